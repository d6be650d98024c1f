// SPDX-License-Identifier: Apache-2.0

#include "src/inspect/show.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/inspect/elements.hpp"

namespace muster::inspect {
namespace {

constexpr std::int64_t edge_items = 3;
constexpr std::int64_t most_in_full = 1000;
constexpr std::size_t most_dims = 64;
constexpr std::uint64_t window_bytes = std::uint64_t{48} << 10;  // a multiple of every group of packed elements
// A smaller window would decode the same chunk many times.
constexpr std::uint64_t compressed_window_bytes = std::uint64_t{6} << 20;

struct Target {
  std::size_t place = 0;
  std::string slice;  // without the brackets
};

/// A tensor with the whole text as its name takes precedence, because names may contain brackets.
Target find_target(const Source& source, const std::string& what) {
  if (const std::optional<std::size_t> place = source.tensors->find(what)) return {*place, ""};
  const std::size_t bracket = what.ends_with(']') ? what.rfind('[') : std::string::npos;
  if (bracket == std::string::npos) return {find_tensor(source, what), ""};
  return {find_tensor(source, what.substr(0, bracket)), what.substr(bracket + 1, what.size() - bracket - 2)};
}

/// Reads values by their index in the tensor, in windows.
class ValueReader {
 public:
  ValueReader(const TensorSource& source, std::size_t place)
      : source_(source), place_(place), entry_(source.tensors()[place]) {
    window_ = source.detail(place).is_compressed ? compressed_window_bytes : window_bytes;
  }

  std::uint64_t bits(std::uint64_t value) {
    const std::uint64_t at = value * static_cast<std::uint64_t>(muster::bits(value_dtype(entry_.dtype))) / 8;
    if (at < begin_ || at >= begin_ + piece_.size()) {
      begin_ = at / window_ * window_;
      piece_ = source_.read_piece(place_, begin_, std::min(window_, entry_.bytes - begin_), memory_);
    }
    return value_bits(entry_.dtype, piece_, value - values_in(entry_.dtype, begin_));
  }

 private:
  const TensorSource& source_;
  std::size_t place_;
  TensorEntry entry_;
  std::uint64_t window_ = window_bytes;
  std::uint64_t begin_ = 0;
  std::span<const std::byte> piece_;
  std::vector<std::byte> memory_;
};

/// Prints the selected part of a tensor, dimension by dimension.
class Printer {
 public:
  Printer(const TensorSource& source, const Target& target, const CatOptions& options, const Sink& sink)
      : source_(source),
        place_(target.place),
        entry_(source.tensors()[target.place]),
        slice_(target.slice),
        selection_(parse_selection(target.slice, entry_.shape)),
        reader_(source, target.place),
        options_(options),
        out_(sink) {
    std::int64_t stride = 1;
    strides_.resize(entry_.shape.size());
    // If an extent is 0, the product of the other extents may overflow.
    if (entry_.bytes != 0)
      for (std::size_t dim = entry_.shape.size(); dim-- > 0; stride *= entry_.shape[dim]) strides_[dim] = stride;
    std::int64_t base = 0;
    for (std::size_t dim = 0; dim < strides_.size(); ++dim) {
      const SelectedRange& range = selection_.ranges[dim];
      base += range.begin * strides_[dim];
      // Dimensions of one element have no effect on raw bytes, and there may be thousands of them.
      if (range.is_kept && (range.count != 1 || options.format != CatFormat::raw))
        kept_.push_back({range.count, range.step * strides_[dim]});
    }
    if (kept_.size() > most_dims && options.format != CatFormat::raw)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("tensor {}: {} dimensions; at most {} are printed. Pass --raw", in_quotes(entry_.name),
                              kept_.size(), most_dims));
    base_ = base;
    elements_ = element_count(selection_.shape());
    is_shortened_ = options.format == CatFormat::text && !options.is_full && elements_ > most_in_full;
  }

  void print() {
    switch (options_.format) {
      case CatFormat::text:
        print_text();
        break;
      case CatFormat::json:
        print_json();
        break;
      case CatFormat::raw:
        print_raw();
        break;
    }
  }

 private:
  struct Dim {
    std::int64_t count = 0;
    std::int64_t stride = 0;
  };

  /// Calls use(element) for each one that is printed, row by row.
  template <class Use>
  void for_each(std::size_t dim, std::int64_t element, Use& use) const {
    if (dim == kept_.size()) return use(element);
    const auto [count, stride] = kept_[dim];
    for (std::int64_t i = 0; i < count; ++i) {
      if (is_cut(count) && i == edge_items) i = count - edge_items;
      for_each(dim + 1, element + i * stride, use);
    }
  }

  [[nodiscard]] bool is_cut(std::int64_t count) const noexcept { return is_shortened_ && count > 2 * edge_items; }

  [[nodiscard]] bool is_json() const noexcept { return options_.format == CatFormat::json; }

  std::string label() const { return printable(entry_.name) + (slice_.empty() ? "" : "[" + printable(slice_) + "]"); }

  // ---- text ----

  void print_text() {
    out_(fmt::format("{}: {} {}\n", label(), to_string(entry_.dtype), to_string(selection_.shape())));
    const std::uint64_t parts = values_per_element(entry_.dtype);
    std::vector<ArrayFormat> formats(parts, ArrayFormat(entry_.dtype));
    auto note = [&](std::int64_t element) {
      for (std::uint64_t part = 0; part < parts; ++part)
        formats[part].note(reader_.bits(static_cast<std::uint64_t>(element) * parts + part));
    };
    if (elements_ != 0) for_each(0, base_, note);
    const auto text_of = [&](std::int64_t element) {
      std::string text = formats[0].text(reader_.bits(static_cast<std::uint64_t>(element) * parts));
      if (parts == 2) {
        // The imaginary part always has a sign, in the column of the minus signs; its unit directly follows the digits.
        const std::string imaginary = formats[1].text(reader_.bits(static_cast<std::uint64_t>(element) * 2 + 1));
        const std::size_t begin = imaginary.find_first_not_of(' ');
        const std::size_t end = imaginary.find_last_not_of(' ') + 1;
        const bool is_signed = imaginary[begin] == '-';
        const std::size_t blanks = !is_signed && begin > 0 && formats[1].has_sign() ? begin - 1 : begin;
        text += std::string(blanks, ' ') + (is_signed ? "" : "+") + imaginary.substr(begin, end - begin) + "j" +
                imaginary.substr(end);
      }
      return text;
    };
    if (kept_.empty()) {
      const std::string text = text_of(base_);
      const std::size_t begin = text.find_first_not_of(' ');
      out_(text.substr(begin, text.find_last_not_of(' ') + 1 - begin));
    } else if (elements_ == 0) {
      out_("[]");
    } else {
      print_rows(0, base_, text_of);
    }
    out_("\n");
  }

  // ---- text and JSON ----

  template <class TextOf>
  void print_rows(std::size_t dim, std::int64_t element, const TextOf& text_of) {
    const auto [count, stride] = kept_[dim];
    out_("[");
    if (dim + 1 == kept_.size()) {
      print_row(dim, element, text_of);
    } else {
      const std::string between =
          is_json() ? "," : std::string(kept_.size() - dim - 1, '\n') + std::string(dim + 1, ' ');
      for (std::int64_t i = 0; i < count; ++i) {
        if (i != 0) out_(between);
        if (is_cut(count) && i == edge_items) {
          out_("...");
          out_(between);
          i = count - edge_items;
        }
        print_rows(dim + 1, element + i * stride, text_of);
      }
    }
    out_("]");
  }

  template <class TextOf>
  void print_row(std::size_t dim, std::int64_t element, const TextOf& text_of) {
    constexpr std::size_t default_width = 80;
    const std::size_t width = options_.style.width == 0 ? default_width : options_.style.width;
    const auto [count, stride] = kept_[dim];
    std::size_t column = dim + 1;
    const auto put = [&](const std::string& text, bool is_first) {
      // Brackets follow the last value, one per dimension.
      if (!is_first && !is_json() && column + 1 + text.size() + kept_.size() > width) {
        out_("\n" + std::string(dim + 1, ' '));
        column = dim + 1;
      } else if (!is_first) {
        out_(is_json() ? "," : " ");
        ++column;
      }
      out_(text);
      column += text.size();
    };
    for (std::int64_t i = 0; i < count; ++i) {
      if (is_cut(count) && i == edge_items) {
        put("...", false);
        i = count - edge_items;
      }
      put(text_of(element + i * stride), i == 0);
    }
  }

  // ---- JSON ----

  std::string json_value(std::uint64_t value) {
    const std::uint64_t word = reader_.bits(value);
    if (entry_.dtype == DType::boolean) return word != 0 ? "true" : "false";
    const std::string text = value_text(entry_.dtype, word);
    const bool is_number = text.find_first_not_of("0123456789+-.e") == std::string::npos;
    return is_number ? text : "\"" + text + "\"";
  }

  void print_json() {
    const Config head = Config::object({{"name", entry_.name},
                                        {"dtype", to_string(entry_.dtype)},
                                        {"shape", extents_of(selection_.shape())},
                                        {"slice", or_null(slice_)}});
    const std::string text = json_report(head, -1);
    out_(text.substr(0, text.rfind('}')) + ",\"values\":");
    const auto text_of = [&](std::int64_t element) {
      const auto value = static_cast<std::uint64_t>(element);
      if (values_per_element(entry_.dtype) == 1) return json_value(value);
      return "[" + json_value(value * 2) + "," + json_value(value * 2 + 1) + "]";
    };
    if (kept_.empty())
      out_(text_of(base_));
    else
      print_rows(0, base_, text_of);
    out_("}\n");
  }

  // ---- raw ----

  void print_raw() {
    if (elements_ == 0) return;
    if (selection_.is_whole(entry_.shape)) return print_whole();
    const std::uint64_t parts = values_per_element(entry_.dtype);
    const std::size_t size = itemsize(value_dtype(entry_.dtype));
    // Packed elements only: bits that do not fill a byte yet.
    std::uint64_t rest = 0;
    int rest_bits = 0;
    const auto put_byte = [&] {
      const char byte = static_cast<char>(rest & 255U);
      out_({&byte, 1});
      rest >>= 8U;
      rest_bits -= 8;
    };
    auto add = [&](std::int64_t element) {
      for (std::uint64_t part = 0; part < parts; ++part) {
        const std::uint64_t word = reader_.bits(static_cast<std::uint64_t>(element) * parts + part);
        if (size != 0) {
          out_({reinterpret_cast<const char*>(&word), size});
          continue;
        }
        rest |= word << rest_bits;
        rest_bits += bits(entry_.dtype);
        if (rest_bits >= 8) put_byte();
      }
    };
    for_each(0, base_, add);
    if (rest_bits > 0) put_byte();
  }

  void print_whole() {
    std::vector<std::byte> memory;
    for (std::uint64_t at = 0; at < entry_.bytes; at += compressed_window_bytes) {
      const auto piece = source_.read_piece(place_, at, std::min(compressed_window_bytes, entry_.bytes - at), memory);
      out_({reinterpret_cast<const char*>(piece.data()), piece.size()});
    }
  }

  const TensorSource& source_;
  std::size_t place_;
  TensorEntry entry_;
  std::string slice_;
  ElementSelection selection_;
  ValueReader reader_;
  const CatOptions& options_;
  const Sink& out_;
  std::vector<std::int64_t> strides_;
  std::vector<Dim> kept_;
  std::int64_t base_ = 0;
  std::int64_t elements_ = 0;
  bool is_shortened_ = false;
};

[[noreturn]] void refuse(std::string_view part, const std::string& cause) {
  throw Error(ErrorKind::invalid_argument, fmt::format("slice {}: {}", in_quotes(part), cause));
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
    refuse(part, fmt::format("{} is not an integer", in_quotes(text)));
  return value;
}

SelectedRange range_of(std::string_view part, std::int64_t extent, std::size_t dim) {
  const std::vector<std::string_view> fields = split(part, ':');
  if (fields.size() == 1) {
    if (part.empty()) refuse(part, "missing index between commas");
    const std::int64_t index = *number(part, part);
    if (index >= extent || index < -extent)
      refuse(part, extent == 0 ? fmt::format("out of range: dimension {} has no elements", dim)
                               : fmt::format("out of range for dimension {} of {} elements (valid: {} to {})", dim,
                                             extent, -extent, extent - 1));
    return {index < 0 ? index + extent : index, 1, 1, false};
  }
  if (fields.size() > 3) refuse(part, "a slice has the form BEGIN:END or BEGIN:END:STEP");
  const std::int64_t step = fields.size() == 3 ? number(fields[2], part).value_or(1) : 1;
  if (step == 0) refuse(part, "the step must not be 0");
  // Limits from "before the first" to "past the last", where steps of either sign start.
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
  // The distance is less than 2^63, so a larger step has the same effect.
  const std::uint64_t size = step > 0 ? static_cast<std::uint64_t>(step) : ~static_cast<std::uint64_t>(step) + 1;
  const std::uint64_t count = (static_cast<std::uint64_t>(distance) - 1) / size + 1;
  return {begin, static_cast<std::int64_t>(count), count == 1 ? 1 : step, true};
}

}  // namespace

void cat(const Source& source, const std::string& what, const CatOptions& options, const Sink& sink) {
  Printer(*source.tensors, find_target(source, what), options, sink).print();
}

Shape ElementSelection::shape() const {
  Shape shape;
  for (const SelectedRange& range : ranges)
    if (range.is_kept) shape.push_back(range.count);
  return shape;
}

bool ElementSelection::is_whole(const Shape& tensor) const {
  for (std::size_t i = 0; i < ranges.size(); ++i)
    if (ranges[i].begin != 0 || ranges[i].count != tensor[i] || ranges[i].step != 1) return false;
  return true;
}

ElementSelection parse_selection(std::string_view text, const Shape& shape) {
  std::vector<std::string_view> parts;
  if (!trimmed(text).empty()) parts = split(text, ',');
  // As in Python, one trailing comma is allowed.
  if (parts.size() > 1 && parts.back().empty()) parts.pop_back();
  const auto dots = std::count(parts.begin(), parts.end(), std::string_view("..."));
  if (dots > 1) refuse(text, "\"...\" may occur only once");
  const std::size_t named = parts.size() - static_cast<std::size_t>(dots);
  if (named > shape.size())
    refuse(text, shape.empty() ? "a scalar cannot be indexed"
                               : fmt::format("too many indices ({}) for the {} of shape {}", named,
                                             counted(shape.size(), "dimension"), to_string(shape)));
  ElementSelection selection;
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
