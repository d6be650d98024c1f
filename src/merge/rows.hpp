// SPDX-License-Identifier: Apache-2.0
#pragma once
// A layout as bytes: rows, each made of runs that lie elsewhere with another distance from row to row. Concatenating
// and cutting along any dimension are this one operation.

#include <cstdint>
#include <vector>

#include "src/merge/layout.hpp"

namespace muster::merge {

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

/// Rows as few and runs as long as they can be. Throws Error(unsupported) where two packed elements of different pieces
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
