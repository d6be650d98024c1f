// SPDX-License-Identifier: Apache-2.0
#pragma once
// A checkpoint's files: the names of its files and of shards, the header of a safetensors file as bytes, and small
// files.

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

// Reads and writes the header of a safetensors file as bytes. Reading makes every check that the format requires.

/// The size of the header's length field.
inline constexpr std::uint64_t safetensors_prefix = 8;
inline constexpr std::string_view safetensors_metadata_key = "__metadata__";
/// Keys in the metadata with the real dtype of a U8 tensor.
inline constexpr std::string_view safetensors_dtype_key = "muster.dtype.";

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  ///< sorted by offset; offsets are from the start of the file
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;
};

/// Parses a header. `head` has the beginning of a file of `file_size` bytes: at least the whole header, or the whole
/// file. `path` is for messages. Throws Error(corrupt) that names the file, the tensor if there is one, and the defect.
/// Allocates at most a small multiple of the header's size.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_size,
                                           const std::string& path);

/// Reads the header of a safetensors file that begins at the byte `begin` of `file`. Throws as
/// parse_safetensors_header, and Error(io).
SafetensorsHeader read_safetensors_header(const os::ReadableFile& file, std::uint64_t begin = 0);

/// Sorts tensors as the format's reference writer does, without holes. Fills `tensors` with offsets and sizes and
/// returns length and header, padded to eight bytes. Throws Error(argument).
std::string make_safetensors_header(std::vector<TensorEntry>& tensors, std::map<std::string, std::string> metadata,
                                    const std::string& path);

/// Applies the keys "muster.dtype.NAME" to the entries and removes them from the metadata. Throws Error(corrupt).
void apply_own_dtypes(SafetensorsHeader& header, const std::string& path);

}  // namespace muster
