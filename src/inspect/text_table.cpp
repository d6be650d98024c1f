// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/text_table.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <unordered_map>

#include "src/base/escaped.hpp"
#include "src/inspect/printable.hpp"

namespace muster::inspect {
namespace {

constexpr std::size_t gap = 2;
constexpr std::size_t least_flexible = 12;

}  // namespace

std::string coloured(const OutputStyle& style, Colour colour, std::string_view text) {
  if (!style.is_coloured) return std::string(text);
  const char* code = "0";
  switch (colour) {
    case Colour::good:
      code = "32";
      break;
    case Colour::warning:
      code = "33";
      break;
    case Colour::bad:
      code = "31";
      break;
    case Colour::faint:
      code = "2";
      break;
    case Colour::strong:
      code = "1";
      break;
  }
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

TextTable::TextTable(std::vector<Column> columns, std::vector<std::size_t> flexible)
    : columns_(std::move(columns)), flexible_(std::move(flexible)) {}

void TextTable::add(const std::vector<std::string>& cells) {
  for (const std::string& cell : cells) {
    text_ += cell;
    ends_.push_back(text_.size());
  }
}

void TextTable::append_to(std::string& out, const OutputStyle& style) const {
  std::vector<std::size_t> widths;
  std::vector<std::size_t> lengths;  // in columns, of all cells, titles first, row by row
  lengths.reserve(ends_.size() + columns_.size());
  const auto cell_at = [&](std::size_t place) {
    const std::size_t begin = place == 0 ? 0 : ends_[place - 1];
    return std::string_view(text_).substr(begin, ends_[place] - begin);
  };
  std::size_t whole = 0;
  for (const Column& column : columns_) widths.push_back(lengths.emplace_back(columns(column.title)));
  for (std::size_t place = 0; place < ends_.size(); ++place) {
    std::size_t& width = widths[place % columns_.size()];
    width = std::max(width, lengths.emplace_back(columns(cell_at(place))));
  }
  for (const std::size_t width : widths) whole += width;
  whole += gap * (widths.size() - 1);
  // The widest one first.
  while (style.width != 0 && whole > style.width) {
    std::size_t& widest = widths[*std::ranges::max_element(flexible_, {}, [&](std::size_t i) { return widths[i]; })];
    if (widest <= least_flexible) break;
    --widest;
    --whole;
  }
  bool is_alone = false;  // the first cell of a row, in a line of its own
  std::unordered_map<std::string, std::string_view> seen;
  for (std::size_t place = 0; place < ends_.size() && !is_alone; place += columns_.size()) {
    const std::string_view cell = cell_at(place);
    if (lengths[columns_.size() + place] > widths[0])
      is_alone = seen.try_emplace(shorten(cell, widths[0]), cell).first->second != cell;
  }
  std::size_t next = 0;  // of the lengths
  const auto append_row = [&](const auto& cell_of) {
    std::size_t spaces = 0;  // owed: none are written at the end of a line
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      const std::string_view whole_cell = cell_of(i);
      std::string shortened;
      std::size_t length = lengths[next++];
      const bool is_long = length > widths[i];
      if (is_long && is_alone && i == 0) {
        out += whole_cell;
        out += '\n';
        length = 0;
      } else if (is_long) {
        shortened = shorten(whole_cell, widths[i]);
        length = columns(shortened);
      }
      const std::string_view cell = is_long ? std::string_view(shortened) : whole_cell;
      const std::size_t pad = widths[i] - std::min(widths[i], length);
      if (columns_[i].align == Align::right) spaces += pad;
      if (length != 0) {
        out.append(spaces, ' ');
        out += cell;
        spaces = 0;
      }
      if (columns_[i].align == Align::left) spaces += pad;
      spaces += gap;
    }
    out += '\n';
  };
  append_row([&](std::size_t i) { return std::string_view(columns_[i].title); });
  for (std::size_t row = 0; row < ends_.size(); row += columns_.size())
    append_row([&](std::size_t i) { return cell_at(row + i); });
}

std::string_view plural(std::uint64_t count) noexcept {
  return count == 1 ? "" : "s";
}

std::string counted(std::uint64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, plural(count));
}

std::string json_text(const std::string& text) {
  return is_utf8(text) ? text : printable(text);
}

}  // namespace muster::inspect
