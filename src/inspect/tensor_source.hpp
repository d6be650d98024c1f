// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors to be looked at, wherever they come from: a model's files, a state file, any other HDF5 file, the states of a
// workspace, or the shards of ranks, merged while they are read.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "muster/config.hpp"
#include "muster/model_dir.hpp"
#include "muster/plan.hpp"
#include "muster/tensor.hpp"
#include "src/checkpoint/shard_files.hpp"
#include "src/checkpoint/tensor_source.hpp"

namespace muster::inspect {

/// A piece of a tensor's bytes, there as long as this lives; pages of a mapping are given back at its end.
class PieceBytes {
 public:
  /// Of a mapping.
  explicit PieceBytes(std::span<const std::byte> mapped) : bytes_(mapped), is_mapped_(true) {}
  /// Its own.
  explicit PieceBytes(std::vector<std::byte> made) : made_(std::move(made)), bytes_(made_) {}
  PieceBytes(const PieceBytes&) = delete;
  PieceBytes& operator=(const PieceBytes&) = delete;
  ~PieceBytes();
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::vector<std::byte> made_;
  std::span<const std::byte> bytes_;
  bool is_mapped_ = false;
};

/// What a source knows of a tensor beside its name, dtype, shape and bytes.
struct TensorDetail {
  std::string_view file = {};      ///< that it is in, as long as the source; empty
                                   ///< where it is in several
  std::uint64_t stored_bytes = 0;  ///< in the file
  bool is_compressed = false;
  std::optional<std::uint64_t> checksum = {};  ///< XXH3-64 of its elements, as the file says
};

/// A file that a source reads.
struct SourceFile {
  std::string path;
  std::uint64_t bytes = 0;    ///< of its tensors
  std::uint64_t tensors = 0;  ///< in it
};

/// Something that may be wrong, or that is not shown.
struct SourceIssue {
  std::string kind;         ///< a word that a program can branch on
  std::string tensor = {};  ///< empty: the whole
  std::string words = {};
};

/// Immutable; thread-safe.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  /// Name, dtype, shape and bytes of each.
  [[nodiscard]] virtual const std::vector<TensorEntry>& tensors() const noexcept = 0;
  [[nodiscard]] virtual std::optional<std::size_t> find(std::string_view name) const noexcept = 0;
  /// [offset, offset + length) of a tensor's bytes, which holds whole elements. Throws Error(io) where a file has
  /// become shorter, Error(rank_mismatch) where ranks that must have the same values do not.
  [[nodiscard]] virtual std::unique_ptr<PieceBytes> read(std::size_t tensor, std::uint64_t offset,
                                                         std::uint64_t length) const = 0;
  /// What stands in the headers beside the tensors.
  [[nodiscard]] virtual std::map<std::string, std::string> metadata() const = 0;

  /// "safetensors", "model", "shards", "state", "workspace", "hdf5".
  [[nodiscard]] virtual std::string_view kind() const noexcept { return "hdf5"; }
  /// None where a source knows nothing of files.
  [[nodiscard]] virtual std::vector<SourceFile> files() const { return {}; }
  [[nodiscard]] virtual TensorDetail detail(std::size_t tensor) const {
    return {.stored_bytes = tensors()[tensor].bytes};
  }
  /// The config's JSON text, where there is a config beside the tensors. Throws Error(corrupt | io).
  [[nodiscard]] virtual std::optional<std::string> config_text() const { return std::nullopt; }
  /// Whose state it is and the like, in the order in which people want it.
  [[nodiscard]] virtual std::vector<std::pair<std::string, Config>> facts() const { return {}; }
  /// What the reader itself found.
  [[nodiscard]] virtual std::vector<SourceIssue> reader_issues() const { return {}; }
};

/// Merges what is read, when it is read.
class MergedSource : public TensorSource {
 public:
  /// Throws Error(argument) on two tensors of one name.
  MergedSource(MergedTensors tensors, std::map<std::string, std::string> metadata);
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return tensors_.tensors(); }
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept override;
  [[nodiscard]] std::unique_ptr<PieceBytes> read(std::size_t tensor, std::uint64_t offset,
                                                 std::uint64_t length) const override;
  [[nodiscard]] std::map<std::string, std::string> metadata() const override { return metadata_; }
  [[nodiscard]] std::string_view kind() const noexcept override { return "shards"; }
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;

 private:
  MergedTensors tensors_;
  std::unordered_map<std::string_view, std::size_t> index_;
  std::map<std::string, std::string> metadata_;
};

/// What of a path is meant, where it has more than one thing.
struct SourceOptions {
  std::string plan = {};    ///< merges shards and the states of ranks
  StateChoice states = {};  ///< of a workspace
};

/// A safetensors file, a state file, any other HDF5 file, a directory in HuggingFace's layout, one with the shards of
/// all ranks, which the plan merges, or a workspace. Of a workspace: the newest complete state of each rank of a job;
/// with a plan merged like shards, else each tensor as "rank2/NAME", unless there is one rank or one is asked for.
/// Throws as ModelDir::open, StateFile::open, ForeignHdf5::open, workspace::survey and MergePlan::load; Error(argument)
/// where shards have no plan, a tensor has no rule in it, or several jobs could be meant; Error(not_found) where there
/// is no such job, rank or generation.
std::unique_ptr<TensorSource> open_source(const std::string& path, const SourceOptions& options = {});

/// The shards of all ranks of a directory, or the states of a workspace that all ranks have, merged by the plan. Throws
/// as open_source.
std::unique_ptr<TensorSource> open_shards(const std::string& directory, const SourceOptions& options);

/// Whether a directory has shards of ranks, and no model.
bool is_shards_directory(const std::string& path);

}  // namespace muster::inspect
