// SPDX-License-Identifier: Apache-2.0
#include "src/merge/rows.hpp"

#include <algorithm>
#include <utility>

#include "muster/error.hpp"

namespace muster::merge {
namespace {

/// Bytes of a tensor's row from its first unit on.
class Ruler {
 public:
  Ruler(const Layout& layout, std::int64_t units)
      : unit_bits_(static_cast<std::uint64_t>(bits(layout.target.dtype)) *
                   static_cast<std::uint64_t>(layout.grain.inner)),
        units_(units),
        is_one_row_(layout.grain.rows == 1) {}

  [[nodiscard]] std::uint64_t offset(std::int64_t unit) const {
    const std::uint64_t at = static_cast<std::uint64_t>(unit) * unit_bits_;
    // Only the very end of a packed tensor may be half a byte.
    if (at % 8 != 0 && !(unit == units_ && is_one_row_))
      throw Error(ErrorKind::unsupported, "two packed 4-bit elements of different slices would share a byte");
    return (at + 7) / 8;
  }
  [[nodiscard]] std::uint64_t bytes() const { return offset(units_); }

 private:
  std::uint64_t unit_bits_;
  std::int64_t units_;
  bool is_one_row_;
};

bool continues(const Run& a, const Run& b) {
  return a.source == b.source && a.stride == b.stride && a.begin + a.bytes == b.begin && a.at + a.bytes == b.at;
}

}  // namespace

Rows rows_of(const Layout& layout) {
  const Ruler target(layout, layout.target_units);
  Rows rows{static_cast<std::uint64_t>(layout.grain.rows), target.bytes(), {}, false};
  std::uint64_t covered = 0;
  for (const Piece& piece : layout.pieces) {
    const Ruler source(layout, layout.source_units[static_cast<std::size_t>(piece.source)]);
    const std::uint64_t at = target.offset(piece.at);
    const std::uint64_t begin = source.offset(piece.begin);
    const Run run{piece.source, begin, source.bytes(), target.offset(piece.at + piece.count) - at, at};
    if (run.bytes == 0) continue;
    covered += run.bytes;
    if (!rows.runs.empty() && layout.combine == Combine::copy && continues(rows.runs.back(), run))
      rows.runs.back().bytes += run.bytes;
    else
      rows.runs.push_back(run);
  }
  rows.has_gaps = layout.combine == Combine::copy && covered < rows.row_bytes;
  // Where every row is one run without a gap on either side, all rows are one.
  const bool is_dense = std::ranges::all_of(
      rows.runs, [&](const Run& run) { return run.bytes == rows.row_bytes && run.stride == rows.row_bytes; });
  if (is_dense && !rows.has_gaps) {
    rows.row_bytes *= rows.count;
    for (Run& run : rows.runs) run.bytes = run.stride = rows.row_bytes;
    rows.count = rows.row_bytes == 0 ? 0 : 1;
  }
  if (rows.row_bytes == 0) rows.count = 0;
  return rows;
}

std::vector<Rectangle> rectangles_of(const Rows& rows, int source, std::uint64_t begin, std::uint64_t end) {
  std::vector<Rectangle> all;
  for (const Run& run : rows.runs) {
    if (run.source != source) continue;
    // Of `count` rows from `row` on the bytes [from, to) of the run.
    const auto add = [&](std::uint64_t row, std::uint64_t count, std::uint64_t from, std::uint64_t to) {
      if (count != 0 && from < to)
        all.push_back({source, run.begin + row * run.stride + from - begin, run.stride,
                       row * rows.row_bytes + run.at + from, rows.row_bytes, to - from, count});
    };
    // The first row that ends after `at`, and what of it lies before.
    const auto position = [&](std::uint64_t at) {
      const std::uint64_t past = at > run.begin ? at - run.begin : 0;
      const std::uint64_t row = std::min(past / run.stride, rows.count);
      const std::uint64_t into = row == rows.count ? 0 : std::min(past - row * run.stride, run.bytes);
      return into == run.bytes ? std::pair(row + 1, std::uint64_t{0}) : std::pair(row, into);
    };
    const auto [first, into_first] = position(begin);
    const auto [last, into_last] = position(end);
    if (first == last) {
      add(first, first == rows.count ? 0 : 1, into_first, into_last);
      continue;
    }
    if (into_first != 0) add(first, 1, into_first, run.bytes);
    const std::uint64_t whole = into_first == 0 ? first : first + 1;
    add(whole, last - whole, 0, run.bytes);
    if (into_last != 0) add(last, 1, 0, into_last);
  }
  return all;
}

std::vector<Rectangle> rectangles(const Rows& rows, std::uint64_t begin, std::uint64_t end) {
  std::vector<Rectangle> all;
  // `count` rows from `row` on, of each of them the bytes [from, to).
  const auto add = [&](std::uint64_t row, std::uint64_t count, std::uint64_t from, std::uint64_t to) {
    if (count == 0 || from >= to) return;
    for (const Run& run : rows.runs) {
      const std::uint64_t first = std::max(from, run.at);
      const std::uint64_t last = std::min(to, run.at + run.bytes);
      if (first >= last) continue;
      all.push_back({run.source, run.begin + row * run.stride + (first - run.at), run.stride,
                     row * rows.row_bytes + first - begin, rows.row_bytes, last - first, count});
    }
  };
  end = std::min(end, rows.bytes());
  if (begin >= end) return all;
  const std::uint64_t first = begin / rows.row_bytes;
  const std::uint64_t last = end / rows.row_bytes;  // of the first row that is not whole
  const std::uint64_t into_first = begin % rows.row_bytes;
  const std::uint64_t into_last = end % rows.row_bytes;
  if (first == last) {
    add(first, 1, into_first, into_last);
    return all;
  }
  const std::uint64_t whole = into_first == 0 ? first : first + 1;
  if (into_first != 0) add(first, 1, into_first, rows.row_bytes);
  add(whole, last - whole, 0, rows.row_bytes);
  add(last, into_last == 0 ? 0 : 1, 0, into_last);
  return all;
}

}  // namespace muster::merge
