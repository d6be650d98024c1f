// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model in the Hugging Face layout: one safetensors file, or several with an index, and the files next to them
// (configs, tokenizers), which are copied with the model.

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

/// All tensors of a directory or of one file, as if they were in a single file. Copies share the mappings. Thread-safe.
class ModelDir {
 public:
  /// Opens a model and reads only the headers. Local. If `path` is a file, the model is that file. In a directory, the
  /// model is the first that exists of these: the files named by the index (model.safetensors.index.json),
  /// model.safetensors, the only numbered set of files, the only file. Throws Error(not_found) if no model exists or
  /// one of its files is missing. Throws Error(corrupt) if the index and the files disagree, or a name is in two files.
  /// Throws Error(invalid_argument) if several models exist, or a file is the shard of a rank. Throws also as
  /// SafetensorsFile::open(). `muster verify` reports the same problems.
  static ModelDir open(const std::string& path);

  /// Returns the path that was opened.
  [[nodiscard]] const std::string& path() const noexcept;
  /// Returns the tensors of all files, ordered by file name, then by offset.
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept;
  /// Returns the files, ordered by name.
  [[nodiscard]] const std::vector<SafetensorsFile>& files() const noexcept;
  /// Returns the file that contains tensors()[index].
  [[nodiscard]] const SafetensorsFile& file_of(std::size_t index) const;
  /// Returns the `__metadata__` of all files. If files disagree about a key, the value of the first file is used.
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept;
  /// Returns the weights in the directory that are not part of the model.
  [[nodiscard]] const Omissions& omissions() const noexcept;
  /// Returns defects of the directory that do not prevent reading its tensors, such as a missing index.
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept;
  /// Returns the index of a name in tensors(); nullopt if it is missing.
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept;
  /// Returns a tensor as a view of the mapped file. Throws Error(not_found) if `index` is not less than
  /// tensors().size().
  [[nodiscard]] Tensor tensor(std::size_t index) const;
  /// Fills `target` with bytes of a tensor, starting at byte `offset` of the tensor. Throws as SafetensorsFile::read().
  void read(std::size_t index, std::uint64_t offset, std::span<std::byte> target) const;

 private:
  struct Contents;
  explicit ModelDir(std::shared_ptr<const Contents> contents) noexcept;
  std::shared_ptr<const Contents> contents_;
};

/// One file of a checkpoint to be written.
struct CheckpointFile {
  std::string name;                       ///< "model-00001-of-00003.safetensors", or "model.safetensors"
  std::vector<std::size_t> tensors = {};  ///< indices in the planned list; ascending, without gaps
};

/// The files of a checkpoint to be written.
struct FileLayout {
  /// The files, in the order of their names.
  std::vector<CheckpointFile> files;
  std::string index;  ///< text of model.safetensors.index.json; empty if there is a single file
};

/// Assigns `entries` to files in order. It makes as few files as possible with at most `max_shard_size` bytes of
/// tensors each, of nearly equal size. A larger tensor gets a separate file. An empty list makes one file. The file
/// names begin with `stem`. Local. Throws Error(invalid_argument) if a name occurs twice.
FileLayout split_into_files(std::span<const TensorEntry> entries, std::uint64_t max_shard_size,
                            std::string_view stem = "model");

/// Returns config.json of a model directory; nullopt if it does not exist. Local. Throws Error(corrupt) if it is not a
/// JSON object, Error(io).
std::optional<Config> read_model_config(const std::string& directory);

/// The result of extra_files_of().
struct ExtraFiles {
  std::vector<std::string> names;  ///< relative paths, sorted
  /// Files not selected, with the reason: "weights of another format", "a link to ..., outside the directory".
  Omissions skipped;
};

/// Selects the files of a model directory that are copied into a derived model. Local. The search includes
/// subdirectories, but never follows links to directories. It never selects *.safetensors, *.safetensors.index.json,
/// muster.checksums.json, or workspace files at the top level. It ignores .git, .cache, .weight_sync and leftovers of
/// unfinished writers, which `skipped` does not list either. `selection` selects from the other files:
/// - empty: regular files except weights in other formats (*.bin, *.pth, *.gguf, *.h5, *.onnx ...), and links to such
///   files inside the directory or from a snapshot of the Hugging Face cache to its blobs;
/// - "all": all of them; "none": no file;
/// - globs separated by commas ("*.json,tokenizer*"): all files that match one of them.
///
/// Throws Error(not_found | io).
ExtraFiles extra_files_of(const std::string& directory, const std::string& selection = {});

/// Copies files of the directory `from` by their relative paths, and creates subdirectories. Each file appears complete
/// and is durable. `between` is called after every few MiB. Local. Throws Error(not_found | io | out_of_space), and
/// exceptions of `between`.
void copy_extra_files(const std::string& from, const std::string& to, std::span<const std::string> names,
                      const std::function<void()>& between = {});

/// Writes a small file that appears complete and replaces an existing one. Durable. Local. Throws Error(io |
/// out_of_space | not_found).
void write_file(const std::string& path, std::string_view text);

}  // namespace muster
