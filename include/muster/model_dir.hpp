// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model as HuggingFace lays it out: one safetensors file, or several with an index, and the files beside them
// (configs, tokenizers), which are carried along.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/omission.hpp"
#include "muster/safetensors.hpp"

namespace muster {

/// All tensors of a directory or of one file, as if they were in one. Copies share the mappings. Thread-safe.
class ModelDir {
 public:
  /// A directory: the files that its index (model.safetensors.index.json) names, else model.safetensors, else the one
  /// numbered set of files, else the one file. A path to a file: that file. Reads headers only. Throws Error(not_found)
  /// if there is no model, or a file of it is missing; Error(corrupt) if the index and the files disagree, or one name
  /// is in two files; Error(argument) if several models are there, or a file is the shard of a rank; and as
  /// SafetensorsFile::open. `muster verify` lists the same findings.
  static ModelDir open(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept;
  /// Of all files: by file name, then in the order of their bytes.
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept;
  /// The files, by name.
  [[nodiscard]] const std::vector<SafetensorsFile>& files() const noexcept;
  /// The file of tensors()[index].
  [[nodiscard]] const SafetensorsFile& file_of(std::size_t index) const;
  /// `__metadata__` of all files; where they disagree, the first file's.
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept;
  /// Weights in the directory that are no part of the model.
  [[nodiscard]] const Omissions& omissions() const noexcept;
  /// What is wrong with the directory although all tensors can be read, such as a missing index.
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept;
  /// The place of a name in tensors().
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept;
  /// A view of the file's mapping. Throws Error(not_found) past the end.
  [[nodiscard]] Tensor tensor(std::size_t index) const;
  /// Fills `target` with a tensor's bytes from `offset` on. Throws as SafetensorsFile::read.
  void read(std::size_t index, std::uint64_t offset, std::span<std::byte> target) const;

 private:
  struct Contents;
  explicit ModelDir(std::shared_ptr<const Contents> contents) noexcept;
  std::shared_ptr<const Contents> contents_;
};

/// One file of a checkpoint that is to be written.
struct ShardFile {
  std::string name;                       ///< "model-00001-of-00003.safetensors", or "model.safetensors"
  std::vector<std::size_t> tensors = {};  ///< places in the list that was planned; ascending, without gaps
};

struct ShardLayout {
  std::vector<ShardFile> files;
  std::string index;  ///< text of model.safetensors.index.json; empty for a single file, which has none
};

/// Fills files in the order of `entries`: as few as there can be with at most `max_shard_size` bytes of tensors each,
/// and these as nearly equal as the order allows. A larger tensor has a file of its own. No entries make one file.
/// `stem`: the first part of their names. Throws Error(argument) on a name twice.
ShardLayout plan_shards(std::span<const TensorEntry> entries, std::uint64_t max_shard_size,
                        std::string_view stem = "model");

/// config.json of a model directory; none if it has none. Throws Error(corrupt) if it is no JSON object,
/// Error(io).
std::optional<Config> read_model_config(const std::string& directory);

struct CarriedFiles {
  std::vector<std::string> names;  ///< relative, sorted
  Omissions left;                  ///< likewise: "weights of another format", "a link to ..., outside the directory"
};

/// Files of a model directory that go into what is made of it: all but *.safetensors, *.safetensors.index.json,
/// muster.checksums.json and what belongs to a workspace at its top, those in folders too; without .git, .cache and
/// what unfinished writers left, which are in neither list. `carry`:
///  - empty: regular files that are no weights of other formats (*.bin, *.pth, *.gguf, *.h5, *.onnx ...), and links to
///    such files inside the directory, or from a snapshot of HuggingFace's cache to its blobs;
///  - "all": those that this leaves, too; "none": no file;
///  - globs with commas between them ("*.json,tokenizer*"): files that match one of them, whatever they are.
/// Linked folders are never followed. Throws Error(not_found | io).
CarriedFiles carried_files(const std::string& directory, const std::string& carry = {});

/// Copies files of `from`, by their relative names; folders are made. Each is durable and appears whole. `between` is
/// called between pieces of some MiB. Throws Error(not_found | io | no_space), and what `between` throws.
void copy_carried_files(const std::string& from, const std::string& to, std::span<const std::string> names,
                        const std::function<void()>& between = {});

/// A small file that appears whole, replacing another. Durable. Throws Error(io | no_space | not_found).
void write_file(const std::string& path, std::string_view text);

}  // namespace muster
