// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that are read on demand: a model, the shards of ranks, or the result of a merge, without the whole ever being
// in memory. Export, shard, diff and all inspecting commands read through this interface.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/model_dir.hpp"
#include "muster/omission.hpp"
#include "muster/safetensors.hpp"
#include "muster/state_file.hpp"
#include "src/core/thread_pool.hpp"
#include "src/merge/layout.hpp"

namespace muster {

/// One tensor as listed in a file's header.
struct NamedSpec {
  std::string name;
  TensorSpec spec;
};

/// Facts about a tensor in addition to its name, dtype, shape and size.
struct TensorDetail {
  std::string_view file = {};      ///< its file, valid as long as the source; empty: several files, or unknown
  std::uint64_t stored_bytes = 0;  ///< in the file
  bool is_compressed = false;
  std::optional<std::uint64_t> checksum = {};  ///< XXH3-64 of its elements, as recorded in the file
};

/// Immutable; thread-safe.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  /// Returns name, dtype, shape and size of each tensor.
  [[nodiscard]] virtual const std::vector<TensorEntry>& tensors() const noexcept = 0;
  /// Fills `target` with a tensor's bytes from `offset` on; the range is valid. Files are read, not mapped: if a mapped
  /// file were truncated, SIGBUS would kill the process. Throws Error(io), and Error(corrupt) if a file has become
  /// shorter.
  virtual void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const = 0;
  /// Returns the bytes of a tensor that is in memory without gaps, so that it need not be copied; otherwise empty.
  [[nodiscard]] virtual std::span<const std::byte> memory(std::size_t /*tensor*/) const noexcept { return {}; }
  [[nodiscard]] virtual TensorDetail detail(std::size_t tensor) const {
    return {.stored_bytes = tensors()[tensor].bytes};
  }
  /// Data that the readers of this source found and left out; a source that merges or views another one returns that
  /// source's omissions. Commands that write or compare pass it to refuse_lost() and omission_notes()
  /// (assembly/export.hpp).
  [[nodiscard]] virtual const Omissions& omissions() const noexcept;
  /// Returns the index of a name among the tensors.
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept;
  /// Reads into `memory`, which grows if it is too short. The result is valid until `memory` changes.
  std::span<const std::byte> read_piece(std::size_t tensor, std::uint64_t offset, std::uint64_t length,
                                        std::vector<std::byte>& memory) const;
};

/// Throws Error(corrupt) if there are no rows, or rows from `begin` on, `stride` apart, are not within `size`.
void check_extent(std::uint64_t begin, std::uint64_t stride, const merge::Rectangle& rows, std::uint64_t size);

/// Reads rows of a tensor, counted from the byte `begin` on, to their positions in `target`. Throws Error(corrupt) if
/// they are outside either of them, and as the source.
void read_rows(const TensorSource& source, std::size_t tensor, std::uint64_t begin, const merge::Rectangle& rows,
               std::span<std::byte> target);

/// Calls write(tensor, offset, bytes) for all bytes of all tensors, in pieces of some MiB, on several threads. With
/// `in_order`, one thread delivers the pieces of a tensor in their order; otherwise any piece may come at any time. In
/// order, a tensor whose file records a checksum of its elements is verified: Error(corrupt). Throws as the source, and
/// what `write` and `progress` throw.
void for_each_piece(const TensorSource& source, bool in_order, ProgressCounter& progress,
                    const std::function<void(std::size_t, std::uint64_t, std::span<const std::byte>)>& write);

/// Writes all tensors to a state file. Throws as for_each_piece, and as StateFileWriter.
void write_state_file(const TensorSource& source, const std::string& path, const Config& config,
                      const StateFileOptions& options, ProgressCounter& progress);

/// A tensor of a rank, by its index in the rank's list, or a part of one.
struct SourceRef {
  int rank = 0;
  std::uint32_t index = 0;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;  ///< from `begin` on; 0: all
  /// Comparisons of boxes only: so many rows of `bytes` bytes, which are `stride` bytes apart.
  std::uint64_t rows = 1;
  std::uint64_t stride = 0;
  friend bool operator==(const SourceRef&, const SourceRef&) = default;
};

/// The process that has a rank's tensors, and their start in its list.
struct RankSources {
  int process = 0;
  std::uint32_t first = 0;
};

/// Returns the sources of all ranks, if process p has the ranks p, p + processes, ... `counts` has the number of
/// tensors of each rank.
std::vector<RankSources> sources_by_rank(std::span<const std::size_t> counts, int processes);

/// A tensor that is assembled from those of ranks.
struct MergedTensor {
  std::string name;
  merge::Layout layout;
  std::vector<SourceRef> sources;         ///< those that the layout requires
  std::vector<std::uint32_t> equal = {};  ///< numbers of the sets that are compared together with this tensor
};

/// Merges tensors while they are read, with memory for the pieces only. Bytes without a source are zero. Reads begin
/// and end at element boundaries.
class MergedTensors : public TensorSource {
 public:
  /// `source` has the tensors of all `ranks`; `equal` has sets of sources that must be bit-identical. Throws
  /// Error(unsupported | invalid_argument) if a layout has no bytes (merge/layout.hpp).
  MergedTensors(std::shared_ptr<const TensorSource> source, std::vector<RankSources> ranks,
                std::vector<MergedTensor> tensors, std::vector<std::vector<SourceRef>> equal);
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  [[nodiscard]] const std::vector<MergedTensor>& merged() const noexcept { return tensors_; }
  /// The sets to which MergedTensor::equal refers.
  [[nodiscard]] const std::vector<std::vector<SourceRef>>& equal_sets() const noexcept { return equal_; }
  /// Throws also Error(rank_mismatch) if ranks that must have the same values differ.
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  [[nodiscard]] const Omissions& omissions() const noexcept override { return source_->omissions(); }

 private:
  void compare(std::size_t tensor, std::uint64_t offset, std::uint64_t length) const;
  [[nodiscard]] std::size_t place_of(const SourceRef& ref) const;
  [[nodiscard]] std::uint64_t bytes_of(const SourceRef& ref) const;

  std::shared_ptr<const TensorSource> source_;
  std::vector<RankSources> ranks_;
  std::vector<MergedTensor> tensors_;
  std::vector<std::vector<SourceRef>> equal_;
  std::vector<std::vector<merge::Band>> bands_;
  std::vector<TensorEntry> entries_;
};

}  // namespace muster
