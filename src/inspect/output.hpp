// SPDX-License-Identifier: Apache-2.0
#pragma once
// Output for people, escaped so that it cannot control a terminal, in aligned columns; and output for programs.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "src/base/message.hpp"

namespace muster::inspect {

/// The properties of the output device. The default is a pipe: nothing is shortened, coloured or drawn.
struct OutputStyle {
  std::size_t width = 0;    ///< columns; 0: unlimited
  bool is_unicode = false;  ///< lines and bars may be drawn with characters beyond ASCII
  bool is_coloured = false;
};

/// The values are the terminal's colour codes.
enum class Colour : std::uint8_t { strong = 1, faint = 2, bad = 31, good = 32, warning = 33 };
/// Returns `text` in this colour if the style has colours.
std::string coloured(const OutputStyle& style, Colour colour, std::string_view text);

/// Receives the output in pieces, in order.
using Sink = std::function<void(std::string_view)>;

/// Escapes text from files. Control characters (C0, DEL, C1), characters that reorder or hide text (bidirectional
/// marks, zero width), and bytes that are not UTF-8 become \n, \x1b or \u202e; a backslash becomes \\. Everything else
/// is unchanged.
std::string printable(std::string_view text);

/// Returns a report for programs: JSON and a line break. Text that is not UTF-8 is escaped as for a terminal.
std::string json_report(const Config& tree, int indent = 2);

/// Writes such a report, whose empty list `key` gets `count` items. They are made one by one, because a tree of a
/// hundred thousand tensors needs more than a gigabyte.
void json_report_with_list(const Config& tree, std::string_view key, std::size_t count,
                           const std::function<Config(std::size_t)>& make_item, const Sink& sink);

/// Returns the list of make(item) for each item.
template <class Items, class Make>
ConfigArray list_of(const Items& items, const Make& make) {
  ConfigArray list;
  for (const auto& item : items) list.push_back(make(item));
  return list;
}
/// Returns a text, or null if it is empty. extents_of() returns the extents of a shape as a list.
Config or_null(const std::string& text);
Config extents_of(const Shape& shape);

/// Returns the number of characters of printable text: one column each.
std::size_t columns(std::string_view text) noexcept;

/// Returns printable text in at most `width` columns (at least 5). A longer text gets "..." in its middle.
std::string shorten(std::string_view text, std::size_t width);

/// Returns text such as "1.2 GB". Units are powers of 1000, as in file managers; sizes below 1000 are exact ("17 B").
std::string human_bytes(std::uint64_t bytes);

/// Returns ascending ranks as "rank 1" or "ranks 0, 2-5".
std::string ranks_text(const std::vector<int>& ranks);

enum class Align : std::uint8_t { left, right };

/// Rows of printable cells, with two spaces between columns and no trailing spaces.
class TextTable {
 public:
  struct Column {
    std::string title;
    Align align = Align::left;
  };
  /// If the style's width is too small, cells of the columns `flexible` are shortened in the middle. If two cells of
  /// the first column would then be equal, that column is printed in full, on lines of its own.
  TextTable(std::vector<Column> columns, std::vector<std::size_t> flexible);
  /// `cells` has one entry per column.
  void add(const std::vector<std::string>& cells);
  [[nodiscard]] bool empty() const noexcept { return ends_.empty(); }
  /// Appends titles and rows, one line each.
  void append_to(std::string& out, const OutputStyle& style) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::size_t> flexible_;
  // All cells are in one text, row by row, because one string per cell would cost more than its contents.
  std::string text_;
  std::vector<std::size_t> ends_;
};

}  // namespace muster::inspect
