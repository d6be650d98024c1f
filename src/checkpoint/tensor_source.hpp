// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that are read when they are wanted: a model, the shards of ranks, or what a merge gives, without the whole
// ever being in memory. Export, shard, diff and everything that looks at tensors read through this.

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
#include "src/core/parallel.hpp"
#include "src/merge/layout.hpp"

namespace muster {

/// What a source knows of a tensor beside its name, dtype, shape and bytes.
struct TensorDetail {
  std::string_view file = {};      ///< that it is in, as long as the source; empty: several, or not known
  std::uint64_t stored_bytes = 0;  ///< in the file
  bool is_compressed = false;
  std::optional<std::uint64_t> checksum = {};  ///< XXH3-64 of its elements, as the file says
};

/// Immutable; thread-safe.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  /// Name, dtype, shape and bytes of each.
  [[nodiscard]] virtual const std::vector<TensorEntry>& tensors() const noexcept = 0;
  /// Fills `target` with a tensor's bytes from `offset` on, which are there. Files are read, not mapped: a mapping
  /// would end the process (SIGBUS) if somebody shortens the file. Throws Error(io), and Error(corrupt) if a file has
  /// become shorter.
  virtual void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const = 0;
  [[nodiscard]] virtual TensorDetail detail(std::size_t tensor) const {
    return {.stored_bytes = tensors()[tensor].bytes};
  }
  /// Data that the readers of this source found and left out; a source that merges or views another one returns that
  /// one's. Commands that write or compare pass it to refuse_lost() and omission_notes() (omissions.hpp).
  [[nodiscard]] virtual const Omissions& omissions() const noexcept;
  /// The place of a name among the tensors.
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept;
  /// The same bytes in `memory`, which grows if it is too short. Valid until it changes.
  std::span<const std::byte> read_piece(std::size_t tensor, std::uint64_t offset, std::uint64_t length,
                                        std::vector<std::byte>& memory) const;
};

/// Throws Error(corrupt) if rows from `begin` on, `stride` apart, are not within `size`, or there is none.
void check_extent(std::uint64_t begin, std::uint64_t stride, const merge::Rectangle& rows, std::uint64_t size);

/// Reads rows of a tensor, of which they are counted from the byte `begin` on, to their places in `target`. Throws
/// Error(corrupt) if they are outside of either, and as the source.
void read_rows(const TensorSource& source, std::size_t tensor, std::uint64_t begin, const merge::Rectangle& rows,
               std::span<std::byte> target);

/// Calls write(tensor, offset, bytes) for all bytes of all tensors, in pieces of some MiB, on several threads.
/// `in_order`: those of one tensor one after the other, by one thread; else any piece at any time. In order, a tensor
/// whose file has a checksum of its elements is held against that: Error(corrupt). Throws as the source, and what
/// `write` and `progress` throw.
void for_each_piece(const TensorSource& source, bool in_order, ProgressCounter& progress,
                    const std::function<void(std::size_t, std::uint64_t, std::span<const std::byte>)>& write);

/// A state file of all tensors. Throws likewise, and as StateFileWriter.
void write_state_file(const TensorSource& source, const std::string& path, const Config& config,
                      const StateFileOptions& options, ProgressCounter& progress);

/// A tensor of a rank, by its place in the rank's list, or a part of one.
struct SourceRef {
  int rank = 0;
  std::uint32_t index = 0;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;  ///< from `begin` on; 0: all
  friend bool operator==(const SourceRef&, const SourceRef&) = default;
};

/// Which process has a rank's tensors, and where in its list they begin.
struct RankSources {
  int process = 0;
  std::uint32_t first = 0;
};

/// Of all ranks, if process p has those of the ranks p, p + processes, ...; `counts`: tensors of each rank.
std::vector<RankSources> sources_by_rank(std::span<const std::size_t> counts, int processes);

/// A tensor that is put together from those of ranks.
struct MergedTensor {
  std::string name;
  merge::Layout layout;
  std::vector<SourceRef> sources;         ///< those that the layout speaks of
  std::vector<std::uint32_t> equal = {};  ///< numbers of the sets that are compared when this tensor's turn comes
};

/// Merges what is read, when it is read: memory is that of the pieces. Bytes that no source has are zero. What is read
/// begins and ends with elements.
class MergedTensors : public TensorSource {
 public:
  /// `source` has the tensors of all `ranks`; `equal`: sets of sources that must be bit for bit equal. Throws
  /// Error(unsupported | argument) if a layout has no bytes (merge/layout.hpp).
  MergedTensors(std::shared_ptr<const TensorSource> source, std::vector<RankSources> ranks,
                std::vector<MergedTensor> tensors, std::vector<std::vector<SourceRef>> equal);
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  [[nodiscard]] const std::vector<MergedTensor>& merged() const noexcept { return tensors_; }
  /// Throws also Error(rank_mismatch) if ranks that must have the same values do not.
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
  std::vector<merge::Rows> rows_;
  std::vector<TensorEntry> entries_;
};

}  // namespace muster
