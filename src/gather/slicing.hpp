// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a layer that is larger than a part of a stream comes in several: which leaves, and which pieces of a tensor, are
// in which part. A pure function of the tree and the size of a part, so that equal trees are cut alike on all ranks.
//
//  1. Leaves go into parts in the order of the tree. Leaves that are no tensors are in part 0; tensors whose bytes do
//     not move, and empty ones, in the part that is being filled.
//  2. A tensor that fits into a part is in one: the part that is being filled, where it has room, else the next one.
//  3. A larger tensor begins where there is room for one row (or, where a row is too large, in a new part), and takes
//     all the room of each part until it ends.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/gather_each.hpp"
#include "src/core/descriptor.hpp"

namespace muster::gather {

class LayerParts {
 public:
  using Moves = std::function<bool(const TensorView&)>;

  /// `layer` stays as long as this. `moves(tensor)`: its bytes take room in a part. Throws Error(argument) on nesting
  /// beyond max_config_depth.
  LayerParts(const Config& layer, std::uint64_t part_bytes, Moves moves);

  [[nodiscard]] std::uint32_t count() const noexcept { return count_; }
  /// The tree of a part. Pieces are views of the layer's tensors, with their owners; a flat piece of a strided tensor
  /// is a copy. `slices`, where it is not null, gets what says where the pieces belong, without rank; in part 0 also a
  /// slice without elements for each tensor that only comes later.
  [[nodiscard]] Config make(std::uint32_t part, std::vector<TensorSlice>* slices) const;

 private:
  struct Piece {
    std::uint32_t part = 0;
    std::int64_t first = 0;
    std::int64_t elements = 0;
  };
  /// A tensor, in the order of the tree.
  struct Leaf {
    const Tensor* tensor = nullptr;
    std::uint32_t part = 0;
    std::string path;
    std::vector<Piece> pieces;  // of one that is cut, one a part from `part` on
  };

  void place(const Tensor& tensor, const std::string& path);
  void cut(Leaf& leaf);
  void next_part();
  [[nodiscard]] std::uint64_t room() const;

  const Config& layer_;
  std::uint64_t part_bytes_;
  Moves moves_;
  std::vector<Leaf> leaves_;
  core::SlotLayout layout_;  // of the part that is being filled
  std::uint32_t part_ = 0;
  std::uint32_t count_ = 1;
};

/// Fills LayerPart::tensors of a part 0, whose slices without elements go.
void list_tensors(LayerPart& part);

/// Elements [first, first + elements) in row-major order, as a flat tensor: a view where the source is contiguous, else
/// a copy on the heap. Packed types: `first` is even.
Tensor flat_run(const Tensor& source, std::int64_t first, std::int64_t elements);

}  // namespace muster::gather
