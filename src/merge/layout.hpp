// SPDX-License-Identifier: Apache-2.0
#pragma once
// The positions of the parts in a tensor: a kind of merge applied to shapes. The same pieces describe both directions,
// from the ranks to the whole and from the whole to the ranks. These functions do not access elements.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "muster/merge.hpp"
#include "muster/tensor.hpp"

namespace muster::merge {

/// Units [begin, begin + count) of a source are units [at, at + count) of the target.
struct UnitRange {
  int source = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t at = 0;
  friend bool operator==(const UnitRange&, const UnitRange&) = default;
};

/// A part of a source that another source also has, for example heads that several ranks hold. The two must be bitwise
/// equal.
struct Copy {
  int source = 0;  ///< the source whose piece is used
  int other = 0;
  std::int64_t begin = 0;  ///< in both sources, in units
  std::int64_t count = 0;
  friend bool operator==(const Copy&, const Copy&) = default;
};

/// How several sources of one element are combined.
enum class Combine : std::uint8_t { copy, max, sum, min, product, average };

/// A tensor as seen along one dimension: `rows` rows of units, each of `inner` contiguous elements. Tensors that are
/// joined or cut along that dimension differ only in the number of units.
struct Grain {
  std::int64_t rows = 1;
  std::int64_t inner = 1;
  friend bool operator==(const Grain&, const Grain&) = default;
};

// The positions of parts in bytes: rows of runs. In the source a run has another position, and another distance from
// row to row. Joining and cutting along any dimension are the same operation.

/// In row r, the run copies `bytes` bytes from begin + r * stride of the source to at + r * row_bytes of the target.
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
  std::vector<Run> runs;  ///< in ascending order of `at`; without overlap, except for max and sum
  bool has_gaps = false;  ///< some bytes are covered by no run; they are zero
  [[nodiscard]] std::uint64_t bytes() const noexcept { return count * row_bytes; }
  friend bool operator==(const Rows&, const Rows&) = default;
};

/// Rows that begin at the byte `at` of the target.
struct Band {
  std::uint64_t at = 0;
  Rows rows;
  friend bool operator==(const Band&, const Band&) = default;
};

/// A target tensor and the sources of its elements. Elements that no piece covers are zero.
struct Layout {
  TensorSpec target;
  Grain grain;
  std::int64_t target_units = 1;
  std::vector<std::int64_t> source_units;  ///< of every source
  Combine combine = Combine::copy;
  std::vector<UnitRange> pieces;  ///< in ascending order of `at`; for max and sum one per source, each the whole
  std::vector<int> must_equal;    ///< sources that must be bitwise equal to the source of the piece (Same)
  std::vector<Copy> copies = {};
  /// If the sources are boxes (merge/boxes.hpp): their bytes, in place of pieces. There are `target_units` units of one
  /// element, in one row.
  std::vector<Band> bands = {};
};

/// The distribution of attention heads over ranks. Each rank has `heads` heads, and the last ranks may have fewer. If
/// the number of ranks is a multiple of the number of heads, each head belongs to `ranks` neighbouring ranks.
struct HeadShare {
  std::int64_t heads = 1;  ///< per rank
  std::int64_t ranks = 1;
  friend bool operator==(const HeadShare&, const HeadShare&) = default;
};
HeadShare share_heads(std::int64_t heads, int parts);

/// Returns the layout that merges all sources. `ranks`: the numbers of the sources in messages (empty: 0, 1, ...).
/// `true_size`: the size along Concat's dimension without the padding that a cut added. `heads`: the number of heads in
/// each block if the sources were cut by whole heads (share_heads); Concat's blocks divided by them are the relative
/// sizes of a head. Throws Error(rank_mismatch) with rank, dtype and shape if the sources do not fit together. Throws
/// Error(invalid_argument) if the dimension does not exist, blocks do not divide it, true_size is too large, or the
/// elements cannot be added.
Layout join(const Merge& merge, std::span<const TensorSpec> sources, std::optional<std::int64_t> true_size = {},
            std::span<const int> ranks = {}, std::span<const std::int64_t> heads = {});

/// A whole tensor cut into parts of one shape.
struct Cut {
  TensorSpec part;
  Grain grain;
  std::int64_t whole_units = 1;
  std::int64_t part_units = 1;
  /// If the parts are padded: the dimension whose size in the whole must be recorded.
  std::optional<std::size_t> padded_dim = {};
  std::vector<std::vector<UnitRange>> pieces;  ///< one list per part; source 0 is the whole
};

/// The inverse of join. `heads`: the number of heads in each block of Concat; heads are not cut. Throws
/// Error(invalid_argument) if the merge is not invertible (First, Max, Sum) or cannot cut this tensor.
Cut cut(const Merge& merge, const TensorSpec& whole, int parts, std::span<const std::int64_t> heads = {});

/// Returns the layout of one part, made from the whole.
Layout part_of(const Cut& cut, int part);

/// Returns the layout of one part, made directly from the sources of the whole. Throws Error(invalid_argument) unless
/// the join and the cut are along the same dimension.
Layout compose(const Layout& whole, const Cut& cut, int part);

/// Returns the layout with as few rows and as long runs as possible. Throws Error(unsupported) if packed elements of
/// two pieces would share a byte.
Rows rows_of(const Layout& layout);

/// Returns the bands of a layout of boxes, or else rows_of() as one band. Throws as rows_of().
std::vector<Band> bands_of(const Layout& layout);

/// A part of a run: `rows` rows of `bytes` bytes each.
struct Rectangle {
  int source = 0;
  std::uint64_t from = 0;  ///< position of the first row in the source
  std::uint64_t from_stride = 0;
  std::uint64_t to = 0;  ///< position of the first row, relative to the beginning of the window
  std::uint64_t to_stride = 0;
  std::uint64_t bytes = 0;
  std::uint64_t rows = 0;
  friend bool operator==(const Rectangle&, const Rectangle&) = default;
};

/// Returns the target positions of the bytes [begin, end) of one source, in as few rectangles as possible. `from` is
/// relative to `begin`; `to` is relative to the beginning of the target.
std::vector<Rectangle> rectangles_of(const Rows& rows, int source, std::uint64_t begin, std::uint64_t end);

/// Returns the parts of the runs in the window [begin, end) of the target, in as few rectangles as possible.
std::vector<Rectangle> rectangles(const Rows& rows, std::uint64_t begin, std::uint64_t end);

}  // namespace muster::merge
