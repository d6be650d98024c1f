// SPDX-License-Identifier: Apache-2.0
#pragma once
// Output for people, which cannot do anything to a terminal, in columns that stand below each other; and for programs.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"

namespace muster::inspect {

/// What the output goes to. The default is a pipe: nothing is cut, coloured or drawn.
struct OutputStyle {
  std::size_t width = 0;    ///< columns; 0: as wide as it gets
  bool is_unicode = false;  ///< lines and bars may be drawn with characters beyond ASCII
  bool is_coloured = false;
};

/// By the numbers that terminals have for them.
enum class Colour : std::uint8_t { strong = 1, faint = 2, bad = 31, good = 32, warning = 33 };
/// `text` in that colour if the style has colours.
std::string coloured(const OutputStyle& style, Colour colour, std::string_view text);

/// Output in pieces, in their order.
using Sink = std::function<void(std::string_view)>;

/// Text from files: control characters (C0, DEL, C1), what reorders or hides text (bidirectional marks, zero width),
/// and bytes that are no UTF-8, all as \n, \x1b or \u202e; a backslash is \\. Everything else as it is.
std::string printable(std::string_view text);

/// A report for programs: JSON and a line break. Text that is no UTF-8 stands there as on a terminal.
std::string json_report(const Config& tree, int indent = 2);

/// For reports: a list of what make(item) gives of each item.
template <class Items, class Make>
ConfigArray list_of(const Items& items, const Make& make) {
  ConfigArray list;
  for (const auto& item : items) list.push_back(make(item));
  return list;
}
/// Likewise a text, null if there is none; the extents of a shape.
Config or_null(const std::string& text);
Config extents_of(const Shape& shape);

/// Characters of printable text: one column each.
std::size_t columns(std::string_view text) noexcept;

/// Printable text in at most `width` columns (at least 5), "..." in its middle if it was longer.
std::string shorten(std::string_view text, std::size_t width);

/// "1.2 GB": powers of 1000, as file managers have them; exact below 1000 ("17 B").
std::string human_bytes(std::uint64_t bytes);

/// "" for 1, else "s".
std::string_view plural(std::uint64_t count) noexcept;
/// "1 tensor", "2 tensors".
std::string counted(std::uint64_t count, std::string_view what);

enum class Align : std::uint8_t { left, right };

/// Rows of printable cells, two spaces between columns, none at the end of a line.
class TextTable {
 public:
  struct Column {
    std::string title;
    Align align = Align::left;
  };
  /// Cells of the columns `flexible` lose their middle if the style's width is too small; those of the first column are
  /// whole, in lines of their own, if two of them could not be told apart otherwise.
  TextTable(std::vector<Column> columns, std::vector<std::size_t> flexible);
  /// As many cells as columns.
  void add(const std::vector<std::string>& cells);
  [[nodiscard]] bool empty() const noexcept { return ends_.empty(); }
  /// Titles and rows, each a line.
  void append_to(std::string& out, const OutputStyle& style) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::size_t> flexible_;
  // All cells in one text, row by row: a string for each would cost more than what is in it.
  std::string text_;
  std::vector<std::size_t> ends_;
};

}  // namespace muster::inspect
