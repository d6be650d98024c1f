// SPDX-License-Identifier: Apache-2.0
#pragma once
// A checkpoint's files: their names and those of shards, in one place; the header of a safetensors file as bytes; and
// small files.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/safetensors.hpp"
#include "src/os/file.hpp"

namespace muster {

inline constexpr std::string_view model_file_name = "model.safetensors";
inline constexpr std::string_view model_index_name = "model.safetensors.index.json";
inline constexpr std::string_view shard_prefix = "rank";

/// "PREFIX-00001-of-00003.safetensors": a file of a model ("model", from 1 on), or a rank's shard ("rank", from 0 on).
/// Other programs write other endings and other numbers of digits.
struct NumberedName {
  std::string prefix;
  std::uint64_t number = 0;
  std::uint64_t count = 0;
  std::string ending = {};  ///< ".safetensors", from the first dot behind the count on
  std::size_t digits = 5;   ///< of the number
  std::string total = {};   ///< the digits of the count
  /// The name of another file of the set.
  [[nodiscard]] std::string with(std::uint64_t other) const;
};
std::string numbered_name(std::string_view prefix, std::uint64_t number, std::uint64_t count);
std::optional<NumberedName> parse_numbered_name(std::string_view name);
/// The name before ".safetensors" by which the programs that a directory is for find its weights: "model", of a part of
/// a diffusers pipeline "diffusion_pytorch_model", of an adapter "adapter_model". Throws as read_model_config.
std::string_view model_stem(const std::string& directory);
/// The name of a rank's shard.
std::string shard_file_name(int rank, int ranks);
struct ShardName {
  int rank = 0;
  int ranks = 0;
};
/// None if the name is no shard's.
std::optional<ShardName> parse_shard_file_name(std::string_view name);
bool is_weight_name(std::string_view name) noexcept;
bool is_index_name(std::string_view name) noexcept;

/// What a file is in a directory that has a checkpoint or shards, by its name there alone.
enum class Belongs : std::uint8_t {
  no,       ///< nothing that these programs or HuggingFace's libraries would write
  beside,   ///< a config, a tokenizer, a model's card
  weights,  ///< of a checkpoint or of a rank, or their index
};
Belongs belongs_to_checkpoint(std::string_view name);

/// Whether an index may say that tensors are in a file of this name: beside it and nowhere else, so that it does not
/// open other files of this machine.
bool is_name_beside(std::string_view name) noexcept;

/// Whether a path is a directory or in it, behind links.
bool is_inside(const std::filesystem::path& path, const std::filesystem::path& directory);

std::string join_path(const std::string& directory, const std::string& name);

/// An index is at most so long.
inline constexpr std::uint64_t longest_index = std::uint64_t{1} << 28;
/// The text of config.json in a directory; none if there is none. Throws as os::read_small_file.
std::optional<std::string> read_model_config_text(const std::string& directory);
/// A small file as text. Throws as os::read_small_file.
std::string read_text(const std::string& path, std::uint64_t most);

/// What is at the top of a directory (behind links, too), sorted, without what unfinished writers left.
struct DirectoryNames {
  std::vector<std::string> files;
  std::vector<std::string> folders;
};
/// Throws Error(not_found | io).
DirectoryNames names_in(const std::string& directory);
/// The files alone. Throws likewise.
std::vector<std::string> files_in(const std::string& directory);

// The header of a safetensors file as bytes: read with every check that the format asks for, and written.

/// The eight bytes of the header's length.
inline constexpr std::uint64_t safetensors_prefix = 8;
inline constexpr std::string_view safetensors_metadata_key = "__metadata__";
/// Keys in the metadata that say what a U8 tensor really is.
inline constexpr std::string_view safetensors_dtype_key = "muster.dtype.";

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  ///< in the order of their bytes; offsets from the start of the file
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;
};

/// `head` is the beginning of a file of `file_size` bytes: all of the header at least, or the whole file. `path` is for
/// messages. Throws Error(corrupt) that names the file, the tensor if there is one, and the defect. Nothing is
/// allocated beyond a small multiple of the header's bytes.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_size,
                                           const std::string& path);

/// Of a file that is one from the byte `begin` on. Throws likewise, and Error(io).
SafetensorsHeader read_safetensors_header(const os::ReadableFile& file, std::uint64_t begin = 0);

/// Puts tensors in the order of the format's reference writer, without holes.
/// Fills `tensors` with offsets and sizes and returns length and header, padded to eight bytes. Throws Error(argument).
std::string make_safetensors_header(std::vector<TensorEntry>& tensors, std::map<std::string, std::string> metadata,
                                    const std::string& path);

/// Applies the keys "muster.dtype.NAME" to the entries and takes them out of the metadata. Throws Error(corrupt).
void apply_own_dtypes(SafetensorsHeader& header, const std::string& path);

}  // namespace muster
