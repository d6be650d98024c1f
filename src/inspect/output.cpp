// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/output.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <unordered_map>

#include "muster/state.hpp"
#include "src/base/escaped.hpp"

namespace muster::inspect {
namespace {

constexpr std::size_t gap = 2;
constexpr std::size_t least_flexible = 12;

/// Escapes dangerous characters in JSON text. They occur only in strings, so JSON's own escapes apply.
std::string printable_json(std::string_view json) {
  std::string out;
  out.reserve(json.size());
  while (!json.empty()) {
    const Character character = first_character(json);
    // Line breaks between values are part of the format: inside strings they are escaped already.
    if (!is_dangerous(character.code) || character.code == '\n') {
      out += json.substr(0, character.bytes);
    } else if (character.code < 0x10000) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned>(character.code));
    } else {
      const auto above = static_cast<unsigned>(character.code) - 0x10000U;
      fmt::format_to(std::back_inserter(out), "\\u{:04x}\\u{:04x}", 0xd800 + (above >> 10), 0xdc00 + (above & 0x3ff));
    }
    json.remove_prefix(character.bytes);
  }
  return out;
}

}  // namespace

std::string coloured(const OutputStyle& style, Colour colour, std::string_view text) {
  return style.is_coloured ? fmt::format("\x1b[{}m{}\x1b[0m", static_cast<int>(colour), text) : std::string(text);
}

std::string printable(std::string_view text) {
  return escaped(text, "\\");
}

std::string json_report(const Config& tree, int indent) {
  const Config utf8 = map_leaves(tree, [](const Config& leaf) {
    return leaf.is_string() && !is_utf8(leaf.as_string()) ? Config(printable(leaf.as_string())) : leaf;
  });
  return printable_json(to_json(utf8, indent)) + "\n";
}

void json_report_with_list(const Config& tree, std::string_view key, std::size_t count,
                           const std::function<Config(std::size_t)>& make_item, const Sink& sink) {
  const std::string text = json_report(tree);
  // Within a text, a line break is escaped.
  const std::string mark = fmt::format("\n  \"{}\": [", key);
  const std::size_t place = text.find(mark) + mark.size();
  sink(std::string_view(text).substr(0, place));
  for (std::size_t i = 0; i < count; ++i) {
    std::string lines = i == 0 ? "\n    " : ",\n    ";
    for (const char c : json_report(make_item(i))) lines += c == '\n' ? "\n    " : std::string_view(&c, 1);
    sink(lines.substr(0, lines.rfind('\n')));
  }
  sink((count == 0 ? "" : "\n  ") + text.substr(place));
}

Config or_null(const std::string& text) {
  return text.empty() ? Config() : Config(text);
}

Config extents_of(const Shape& shape) {
  return ConfigArray(shape.begin(), shape.end());
}

std::size_t columns(std::string_view text) noexcept {
  std::size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xc0U) != 0x80 ? 1 : 0;
  return count;
}

std::string shorten(std::string_view text, std::size_t width) {
  const std::size_t length = columns(text);
  if (length <= width) return std::string(text);
  const std::size_t kept = width < 5 ? 2 : width - 3;
  // The end is more informative than the beginning: "...layers.11.mlp.weight".
  const std::size_t head = kept / 3;
  const std::size_t tail = kept - head;
  const auto byte_of = [&text](std::size_t column) {
    std::size_t at = 0;
    for (; at < text.size(); ++at) {
      if ((static_cast<unsigned char>(text[at]) & 0xc0U) == 0x80) continue;
      if (column-- == 0) break;
    }
    return at;
  };
  return fmt::format("{}...{}", text.substr(0, byte_of(head)), text.substr(byte_of(length - tail)));
}

std::string human_bytes(std::uint64_t bytes) {
  if (bytes < 1000) return fmt::format("{} B", bytes);
  constexpr std::array<const char*, 6> units = {"kB", "MB", "GB", "TB", "PB", "EB"};
  auto value = static_cast<double>(bytes) / 1000;
  std::size_t unit = 0;
  // Values from 999,950 on would be printed as 1000.0.
  while (value >= 999.95 && unit + 1 < units.size()) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, units[unit]);
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string out;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    out += (out.empty() ? "" : ", ") + fmt::to_string(ranks[i]);
    if (end - i > 1) out += fmt::format("-{}", ranks[end - 1]);
    i = end;
  }
  return fmt::format("rank{} {}", plural(ranks.size()), out);
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
  // The widest column is shortened first.
  while (style.width != 0 && whole > style.width) {
    std::size_t& widest = widths[*std::ranges::max_element(flexible_, {}, [&](std::size_t i) { return widths[i]; })];
    if (widest <= least_flexible) break;
    --widest;
    --whole;
  }
  bool is_alone = false;  // the first cell of a row has a line of its own
  std::unordered_map<std::string, std::string_view> seen;
  for (std::size_t place = 0; place < ends_.size() && !is_alone; place += columns_.size()) {
    const std::string_view cell = cell_at(place);
    if (lengths[columns_.size() + place] > widths[0])
      is_alone = seen.try_emplace(shorten(cell, widths[0]), cell).first->second != cell;
  }
  std::size_t next = 0;  // index in `lengths`
  const auto append_row = [&](const auto& cell_of) {
    std::size_t spaces = 0;  // pending spaces: none are written at the end of a line
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

}  // namespace muster::inspect
