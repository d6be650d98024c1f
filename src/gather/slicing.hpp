// SPDX-License-Identifier: Apache-2.0
#pragma once
// Cuts a layer that is larger than a part of a stream into several parts: it assigns leaves and pieces of tensors to
// parts. The cut is a pure function of the tree and the size of a part, so equal trees are cut alike on all ranks.
//
//  1. Leaves are assigned to parts in the order of the tree. Leaves that are not tensors are in part 0. Empty tensors,
//     and tensors whose bytes do not move, are in the current part.
//  2. A tensor that fits into a part is not cut: it is in the current part if there is room, else in the next one.
//  3. A larger tensor begins where there is room for one row (or in a new part, if a row is too large). It fills each
//     part until it ends.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/gather_each.hpp"
#include "src/core/descriptor.hpp"

namespace muster::gather {

class LayerParts {
 public:
  using Moves = std::function<bool(const TensorView&)>;

  /// `layer` must outlive this object. `moves(tensor)` returns whether its bytes take room in a part. Throws
  /// Error(invalid_argument) on nesting beyond max_config_depth.
  LayerParts(const Config& layer, std::uint64_t part_bytes, Moves moves);

  [[nodiscard]] std::uint32_t count() const noexcept { return count_; }
  /// Returns the tree of a part. Pieces are views of the layer's tensors and share their owners; a flat piece of a
  /// strided tensor is a copy. If `slices` is not null, it receives the positions of the pieces, without ranks. In part
  /// 0 it also receives a slice without elements for each tensor that begins in a later part.
  [[nodiscard]] Config make(std::uint32_t part, std::vector<TensorSlice>* slices) const;

 private:
  struct SlicedPiece {
    std::uint32_t part = 0;
    std::int64_t first = 0;
    std::int64_t elements = 0;
  };
  /// A tensor, in the order of the tree.
  struct TreeLeaf {
    const Tensor* tensor = nullptr;
    std::uint32_t part = 0;
    std::string path;
    std::vector<SlicedPiece> pieces;  // pieces of a cut tensor: one per part, from `part` on
  };

  void place(const Tensor& tensor, const std::string& path);
  void cut(TreeLeaf& leaf);
  void next_part();
  [[nodiscard]] std::uint64_t room() const;

  const Config& layer_;
  std::uint64_t part_bytes_;
  Moves moves_;
  std::vector<TreeLeaf> leaves_;
  core::SlotLayout layout_;  // layout of the current part
  std::uint32_t part_ = 0;
  std::uint32_t count_ = 1;
};

/// Fills LayerPart::tensors of a part 0, and removes slices without elements.
void list_tensors(LayerPart& part);

/// Encodes slices for the root of a stream, without their ranks.
std::vector<std::byte> encode_slices(const std::vector<TensorSlice>& slices);
/// Decodes the slices of the rank with this global number. No bytes mean no slices. Throws Error(corrupt) on any
/// defect.
std::vector<TensorSlice> decode_slices(std::span<const std::byte> bytes, int rank);

/// Returns elements [first, first + elements) in row-major order as a flat tensor. It is a view if the source is
/// contiguous, else a copy on the heap. For packed types `first` must be even.
Tensor flat_run(const Tensor& source, std::int64_t first, std::int64_t elements);

}  // namespace muster::gather
