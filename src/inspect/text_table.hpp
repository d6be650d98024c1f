// SPDX-License-Identifier: Apache-2.0
#pragma once
// Output for people: columns that stand below each other, and what a terminal can show.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace muster::inspect {

/// What the output goes to. The default is a pipe: nothing is cut, coloured or drawn.
struct OutputStyle {
  std::size_t width = 0;    ///< columns; 0: as wide as it gets
  bool is_unicode = false;  ///< lines and bars may be drawn with characters beyond ASCII
  bool is_coloured = false;
};

enum class Colour : std::uint8_t { good, warning, bad, faint, strong };
/// `text` in that colour where the style has colours.
std::string coloured(const OutputStyle& style, Colour colour, std::string_view text);

enum class Align : std::uint8_t { left, right };

/// Rows of printable cells (printable.hpp), two spaces between columns, none at the end of a line.
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

/// Output in pieces, in their order.
using Sink = std::function<void(std::string_view)>;

/// "" for 1, else "s".
std::string_view plural(std::uint64_t count) noexcept;
/// "1 tensor", "2 tensors".
std::string counted(std::uint64_t count, std::string_view what);

/// Text that may stand in JSON: as it is where it is UTF-8, else as on a terminal.
std::string json_text(const std::string& text);

}  // namespace muster::inspect
