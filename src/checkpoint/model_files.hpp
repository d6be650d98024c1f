// SPDX-License-Identifier: Apache-2.0
#pragma once
// File names of HuggingFace's layout, in one place.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace muster {

inline constexpr std::string_view model_file_name = "model.safetensors";
inline constexpr std::string_view model_index_name = "model.safetensors.index.json";

/// "model-00001-of-00003.safetensors"; `number` counts from 1. "model.safetensors" where there is one file only.
std::string model_shard_name(std::size_t number, std::size_t count);
bool is_weight_name(std::string_view name) noexcept;
bool is_index_name(std::string_view name) noexcept;

/// What a file is in a directory that has a checkpoint or shards, by its name there alone.
enum class Belongs : std::uint8_t {
  no,       ///< nothing that these programs or HuggingFace's libraries would write
  beside,   ///< a config, a tokenizer, a model's card
  weights,  ///< of a checkpoint or of a rank, or their index
};
Belongs belongs_to_checkpoint(std::string_view name);

std::string join_path(const std::string& directory, const std::string& name);

/// A small file as text. Throws as os::read_small_file.
std::string read_text(const std::string& path, std::uint64_t most);

/// Names of the regular files (behind links, too) at the top of a directory, sorted, without what unfinished writers
/// left. Throws Error(not_found | io).
std::vector<std::string> files_in(const std::string& directory);

}  // namespace muster
