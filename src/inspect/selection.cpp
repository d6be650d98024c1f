// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/selection.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"

namespace muster::inspect {
namespace {

[[noreturn]] void refuse(std::string_view part, const std::string& words) {
  throw Error(ErrorKind::argument, fmt::format("the slice {}: {}", in_quotes(part), words));
}

std::string_view trimmed(std::string_view text) noexcept {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(trimmed(text.substr(begin, end - begin)));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

std::optional<std::int64_t> number(std::string_view text, std::string_view part) {
  if (text.empty()) return std::nullopt;
  std::string_view digits = text;
  if (digits.front() == '+') digits.remove_prefix(1);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size())
    refuse(part, fmt::format("{} is no whole number", in_quotes(text)));
  return value;
}

SelectedRange range_of(std::string_view part, std::int64_t extent, std::size_t dim) {
  const std::vector<std::string_view> fields = split(part, ':');
  if (fields.size() == 1) {
    if (part.empty()) refuse(part, "an index is missing");
    const std::int64_t index = *number(part, part);
    if (index >= extent || index < -extent)
      refuse(part, fmt::format("dimension {} has {} elements, from {} to {}", dim, extent,
                               extent == 0 ? "none" : fmt::to_string(-extent),
                               extent == 0 ? "none" : fmt::to_string(extent - 1)));
    return {index < 0 ? index + extent : index, 1, 1, false};
  }
  if (fields.size() > 3) refuse(part, "a slice is BEGIN:END or BEGIN:END:STEP");
  const std::int64_t step = fields.size() == 3 ? number(fields[2], part).value_or(1) : 1;
  if (step == 0) refuse(part, "a step cannot be 0");
  // Between "before the first" and "past the last", from where steps of either sign go.
  const std::int64_t least = step > 0 ? 0 : -1;
  const std::int64_t most = step > 0 ? extent : extent - 1;
  const auto placed = [&](std::string_view field, std::int64_t otherwise) {
    const std::optional<std::int64_t> given = number(field, part);
    if (!given) return otherwise;
    return std::clamp(*given < 0 ? (*given < -extent ? least : *given + extent) : *given, least, most);
  };
  const std::int64_t begin = placed(fields[0], step > 0 ? least : most);
  const std::int64_t end = placed(fields[1], step > 0 ? most : least);
  const std::int64_t distance = step > 0 ? end - begin : begin - end;
  if (distance <= 0) return {0, 0, 1, true};
  // The distance is less than 2^63, so the step's size matters only where it is smaller.
  const std::uint64_t size = step > 0 ? static_cast<std::uint64_t>(step) : ~static_cast<std::uint64_t>(step) + 1;
  const std::uint64_t count = (static_cast<std::uint64_t>(distance) - 1) / size + 1;
  return {begin, static_cast<std::int64_t>(count), count == 1 ? 1 : step, true};
}

}  // namespace

Shape Selection::shape() const {
  Shape shape;
  for (const SelectedRange& range : ranges)
    if (range.is_kept) shape.push_back(range.count);
  return shape;
}

bool Selection::is_whole(const Shape& tensor) const {
  for (std::size_t i = 0; i < ranges.size(); ++i)
    if (ranges[i].begin != 0 || ranges[i].count != tensor[i] || ranges[i].step != 1) return false;
  return true;
}

Selection parse_selection(std::string_view text, const Shape& shape) {
  std::vector<std::string_view> parts;
  if (!trimmed(text).empty()) parts = split(text, ',');
  // As in Python, one comma may follow the last.
  if (parts.size() > 1 && parts.back().empty()) parts.pop_back();
  const auto dots = std::count(parts.begin(), parts.end(), std::string_view("..."));
  if (dots > 1) refuse(text, "\"...\" can stand once");
  const std::size_t named = parts.size() - static_cast<std::size_t>(dots);
  if (named > shape.size())
    refuse(text, fmt::format("{} indices for the {} dimensions of {}", named, shape.size(), to_string(shape)));
  Selection selection;
  const auto whole = [&](std::size_t until) {
    while (selection.ranges.size() < until) selection.ranges.push_back({0, shape[selection.ranges.size()], 1, true});
  };
  for (const std::string_view part : parts) {
    if (part == "...") {
      whole(selection.ranges.size() + shape.size() - named);
    } else {
      const std::size_t dim = selection.ranges.size();
      selection.ranges.push_back(range_of(part, shape[dim], dim));
    }
  }
  whole(shape.size());
  return selection;
}

}  // namespace muster::inspect
