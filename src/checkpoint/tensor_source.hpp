// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that are read when they are wanted: a model, the shards of ranks, or what a merge gives, without the whole
// ever being in memory. Export, shard, diff and everything that looks at tensors read through this.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/safetensors.hpp"
#include "src/merge/layout.hpp"
#include "src/merge/rows.hpp"

namespace muster {

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
  /// The file that a tensor is in, as long as the source; empty if there are several, or if the source does not know.
  [[nodiscard]] virtual std::string_view file_of(std::size_t) const { return {}; }
};

/// Reads rows of a tensor, of which they are counted from the byte `begin` on, to their places in `target`. Throws
/// Error(corrupt) if they are outside of either, and as the source.
void read_rows(const TensorSource& source, std::size_t tensor, std::uint64_t begin, const merge::Rectangle& rows,
               std::span<std::byte> target);

/// A part of a tensor of a source.
struct TensorPart {
  int rank = 0;  ///< whose it is, for messages
  std::size_t tensor = 0;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
};

/// A tensor that is put together from others.
struct MergedTensor {
  std::string name;
  merge::Layout layout;
  std::vector<TensorPart> parts;                              ///< those that the layout speaks of
  std::vector<std::pair<TensorPart, TensorPart>> equal = {};  ///< must be bit for bit equal
};

/// Merges what is read, when it is read: memory is that of the pieces. Bytes that no part has are zero. What is read
/// begins and ends with elements.
class MergedTensors : public TensorSource {
 public:
  /// Throws Error(unsupported | argument) if a layout has no bytes (merge/rows.hpp).
  MergedTensors(std::shared_ptr<const TensorSource> source, std::vector<MergedTensor> tensors);
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  /// Throws also Error(rank_mismatch) if ranks that must have the same values do not.
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] std::string_view file_of(std::size_t tensor) const override;
  [[nodiscard]] const std::vector<TensorPart>& parts(std::size_t tensor) const { return tensors_[tensor].parts; }

 private:
  [[nodiscard]] std::vector<std::byte> bytes_of(const TensorPart& part, std::uint64_t offset,
                                                std::uint64_t length) const;
  void compare(std::size_t tensor, std::uint64_t offset, std::uint64_t length) const;

  std::shared_ptr<const TensorSource> source_;
  std::vector<MergedTensor> tensors_;
  std::vector<merge::Rows> rows_;
  std::vector<TensorEntry> entries_;
};

}  // namespace muster
