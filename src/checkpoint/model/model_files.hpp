// SPDX-License-Identifier: Apache-2.0
#pragma once
// A checkpoint's files: the names of its files and of shards, the header of a safetensors file as bytes, and small
// files.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace muster {

inline constexpr std::string_view model_file_name = "model.safetensors";
inline constexpr std::string_view model_index_name = "model.safetensors.index.json";
inline constexpr std::string_view shard_prefix = "rank";
/// The folder in a local copy of a version of weights that has its marker and its locks. It is not a part of the model.
inline constexpr std::string_view sync_folder = ".weight_sync";
/// The checksums of a checkpoint, for `muster verify`.
inline constexpr std::string_view checksums_file_name = "muster.checksums.json";

/// "PREFIX-00001-of-00003.safetensors": a file of a model ("model", from 1 on), or a rank's shard ("rank", from 0 on).
/// Other programs use other endings and other numbers of digits.
struct NumberedName {
  std::string prefix;
  std::uint64_t number = 0;
  std::uint64_t count = 0;
  std::string ending = {};  ///< ".safetensors", from the first dot after the count on
  std::size_t digits = 5;   ///< digits of the number
  std::string total = {};   ///< the digits of the count
  /// Returns the name of another file of the set.
  [[nodiscard]] std::string with(std::uint64_t other) const;
};
std::string numbered_name(std::string_view prefix, std::uint64_t number, std::uint64_t count);
std::optional<NumberedName> parse_numbered_name(std::string_view name);
/// Returns the name before ".safetensors" that the programs for such a directory look for: "model",
/// "diffusion_pytorch_model" for a part of a diffusers pipeline, or "adapter_model" for an adapter. Throws as
/// read_model_config.
std::string_view model_stem(const std::string& directory);
/// Returns the name of a rank's shard.
std::string shard_file_name(int rank, int ranks);
struct ShardName {
  int rank = 0;
  int ranks = 0;
};
/// Returns nullopt if the name is not that of a shard.
std::optional<ShardName> parse_shard_file_name(std::string_view name);
bool is_weight_name(std::string_view name) noexcept;
bool is_index_name(std::string_view name) noexcept;

/// The role of a file in a directory with a checkpoint or shards, determined by its name alone.
enum class Belongs : std::uint8_t {
  no,       ///< none: neither Muster nor Hugging Face's libraries write such a file
  beside,   ///< a config, a tokenizer, a model card
  weights,  ///< weights of a checkpoint or of a rank, or their index
};
Belongs belongs_to_checkpoint(std::string_view name);

/// Whether an index may name this file: it must be in the index's directory, so that an index cannot open other files
/// of this machine.
bool is_name_beside(std::string_view name) noexcept;

/// Whether a path is a directory or inside it, after resolving links.
bool is_inside(const std::filesystem::path& path, const std::filesystem::path& directory);

std::string join_path(const std::string& directory, const std::string& name);

/// The size limit of an index.
inline constexpr std::uint64_t longest_index = std::uint64_t{1} << 28;
/// Returns the text of config.json in a directory; nullopt if it does not exist. Throws as os::read_small_file.
std::optional<std::string> read_model_config_text(const std::string& directory);
/// Returns a small file as text. Throws as os::read_small_file.
std::string read_text(const std::string& path, std::uint64_t most);

/// The top level of a directory (following links), sorted, without leftovers of unfinished writers.
struct DirectoryNames {
  std::vector<std::string> files;
  std::vector<std::string> folders;
};
/// Throws Error(not_found | io).
DirectoryNames names_in(const std::string& directory);
/// Returns the files alone. Throws as names_in.
std::vector<std::string> files_in(const std::string& directory);

}  // namespace muster
