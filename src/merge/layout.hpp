// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the parts of a tensor lie: a kind of merge applied to shapes. The same pieces serve both ways, from the ranks
// to the whole and from the whole to the ranks. Nothing here touches elements.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "muster/merge.hpp"
#include "muster/tensor.hpp"

namespace muster::merge {

/// Units [begin, begin + count) of a source are units [at, at + count) of the target.
struct Piece {
  int source = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t at = 0;
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// A part of a source that another one has, too, and that has to be the same, bit for bit: of the heads that several
/// ranks have.
struct Copy {
  int source = 0;  ///< whose piece is used
  int other = 0;
  std::int64_t begin = 0;  ///< in both, in units
  std::int64_t count = 0;
  friend bool operator==(const Copy&, const Copy&) = default;
};

/// What happens if several sources have the same element.
enum class Combine : std::uint8_t { copy, max, sum, min, product, average };

/// A tensor seen along one dimension: `rows` times so many units, each of `inner` elements that lie together. Tensors
/// that are joined or cut along that dimension differ in the number of units only.
struct Grain {
  std::int64_t rows = 1;
  std::int64_t inner = 1;
  friend bool operator==(const Grain&, const Grain&) = default;
};

/// A target tensor and where its elements come from. What no piece covers is zero.
struct Layout {
  TensorSpec target;
  Grain grain;
  std::int64_t target_units = 1;
  std::vector<std::int64_t> source_units;  ///< of every source
  Combine combine = Combine::copy;
  std::vector<Piece> pieces;    ///< in ascending order of `at`; for max and sum one a source, each the whole
  std::vector<int> must_equal;  ///< sources that have to be the piece's, bit for bit (Same)
  std::vector<Copy> copies = {};
};

/// How attention heads are shared out: so many a rank, the last ranks fewer; or a head to each of `ranks` neighbours,
/// if there are that many times as many ranks as heads.
struct HeadShare {
  std::int64_t heads = 1;  ///< a rank
  std::int64_t ranks = 1;
  friend bool operator==(const HeadShare&, const HeadShare&) = default;
};
HeadShare share_heads(std::int64_t heads, int parts);

/// All sources merged; `ranks` are what messages call them (empty: 0, 1, ...). `true_size`, if given, is the size
/// along Concat's dimension without the padding that a cut had to add. `heads`: the sources were cut by whole heads, so
/// many in each block (share_heads); Concat's blocks divided by them are the relative sizes of a head. Throws
/// Error(rank_mismatch) that names rank, dtype and shape if they do not fit; Error(argument) if the dimension is not
/// there, blocks do not divide it, true_size is more than there is, or the elements cannot be added.
Layout join(const Merge& merge, std::span<const TensorSpec> sources, std::optional<std::int64_t> true_size = {},
            std::span<const int> ranks = {}, std::span<const std::int64_t> heads = {});

/// A whole tensor cut into parts of one shape.
struct Cut {
  TensorSpec part;
  Grain grain;
  std::int64_t whole_units = 1;
  std::int64_t part_units = 1;
  std::optional<std::size_t> padded_dim = {};  ///< what has to be remembered: the whole's size along it
  std::vector<std::vector<Piece>> pieces;      ///< of each part; source 0 is the whole
};

/// The way back of join. `heads`: of each block of Concat, which are not cut through. Throws Error(argument) if the
/// merge has none (First, Max, Sum) or cannot cut this tensor.
Cut cut(const Merge& merge, const TensorSpec& whole, int parts, std::span<const std::int64_t> heads = {});

/// One part from the whole.
Layout part_of(const Cut& cut, int part);

/// One part made straight from the sources of the whole. Throws Error(argument) if the two do not see the whole
/// along one dimension.
Layout compose(const Layout& whole, const Cut& cut, int part);

// A layout as bytes: rows, each made of runs that lie elsewhere with another distance from row to row. Concatenating
// and cutting along any dimension are this one operation.

/// In row r, `bytes` from begin + r * stride of the source go to at + r * row_bytes of the target.
struct Run {
  int source = 0;
  std::uint64_t begin = 0;
  std::uint64_t stride = 0;
  std::uint64_t bytes = 0;
  std::uint64_t at = 0;
  friend bool operator==(const Run&, const Run&) = default;
};

struct Rows {
  std::uint64_t count = 0;
  std::uint64_t row_bytes = 0;
  std::vector<Run> runs;  ///< in ascending order of `at`; without overlap, but for max and sum
  bool has_gaps = false;  ///< bytes that no run covers, and that are zero
  [[nodiscard]] std::uint64_t bytes() const noexcept { return count * row_bytes; }
};

/// Rows as few and runs as long as they can be. Throws Error(unsupported) if two packed elements of different pieces
/// would share a byte.
Rows rows_of(const Layout& layout);

/// A part of a run: `rows` times `bytes`.
struct Rectangle {
  int source = 0;
  std::uint64_t from = 0;  ///< of the first row in the source
  std::uint64_t from_stride = 0;
  std::uint64_t to = 0;  ///< of the first row, counted from the window's begin
  std::uint64_t to_stride = 0;
  std::uint64_t bytes = 0;
  std::uint64_t rows = 0;
  friend bool operator==(const Rectangle&, const Rectangle&) = default;
};

/// Where the bytes [begin, end) of one source go, in as few rectangles as can be; `from` is counted from `begin`, `to`
/// from the target's.
std::vector<Rectangle> rectangles_of(const Rows& rows, int source, std::uint64_t begin, std::uint64_t end);

/// What of the runs lies in the window [begin, end) of the target, in as few rectangles as can be.
std::vector<Rectangle> rectangles(const Rows& rows, std::uint64_t begin, std::uint64_t end);

}  // namespace muster::merge
