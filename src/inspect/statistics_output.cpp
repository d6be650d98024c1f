// SPDX-License-Identifier: Apache-2.0
// The output of `muster stats`.

#include "src/inspect/statistics.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "src/checkpoint/omissions.hpp"
#include "src/inspect/elements.hpp"

namespace muster::inspect {
namespace {

/// `digits` is the number of significant digits of real numbers, and of integers that would be too long otherwise.
std::string short_number(double value, int digits) {
  return fmt::format("{:.{}g}", value, digits);
}

std::string short_number(const Config& value, int digits, std::size_t longest) {
  std::string text;
  switch (value.type()) {
    case Config::Type::null:
      return "-";
    case Config::Type::boolean:
      return value.as_bool() ? "true" : "false";
    case Config::Type::integer:
      text = fmt::to_string(value.as_int());
      break;
    case Config::Type::unsigned_integer:
      text = fmt::to_string(value.as_uint());
      break;
    default:
      return short_number(value.as_double(), digits);
  }
  return text.size() <= longest ? text : short_number(value.as_double(), digits);
}

std::string percent(std::uint64_t part, std::uint64_t whole) {
  if (part == 0 || whole == 0) return "0";
  const double value = 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  // 100 % is printed only if all values count, and 0 % only if none does.
  if (part != whole && value > 99.9) return ">99.9 %";
  return value < 0.1 ? "<0.1 %" : fmt::format("{:.1f} %", value);
}

/// Returns a bar that fills `part` of `columns` columns, in eighths of a column if Unicode is available.
std::string bar(double part, std::size_t columns, bool is_unicode) {
  if (!is_unicode)
    return std::string(std::max<std::size_t>(part > 0 ? 1 : 0, std::lround(part * static_cast<double>(columns))), '#');
  constexpr std::array<std::string_view, 8> eighths = {"",       "\u258f", "\u258e", "\u258d",
                                                       "\u258c", "\u258b", "\u258a", "\u2589"};
  const auto length = static_cast<std::size_t>(std::lround(part * static_cast<double>(columns) * 8));
  std::string out;
  for (std::size_t i = 0; i < length / 8; ++i) out += "\u2588";
  out += eighths[part > 0 ? std::max<std::size_t>(length % 8, length == 0 ? 1 : 0) : 0];
  return out;
}

void append_histogram(std::string& out, const TensorStatistics& tensor, const OutputStyle& style) {
  const Histogram& histogram = tensor.histogram;
  if (histogram.counts.empty()) return;
  const std::uint64_t largest = *std::max_element(histogram.counts.begin(), histogram.counts.end());
  const double step = (histogram.high / 2 - histogram.low / 2) / static_cast<double>(histogram.counts.size()) * 2;
  std::vector<std::string> begins;
  std::vector<std::string> counts;
  std::size_t begin_width = 0;
  std::size_t count_width = 0;
  for (std::size_t i = 0; i < histogram.counts.size(); ++i) {
    // Near zero, rounding would leave values such as 1.4e-17.
    double begin = histogram.low + static_cast<double>(i) * step;
    if (std::abs(begin) < step * 1e-9) begin = 0;
    begins.push_back(fmt::format("{:.4g}", begin));
    counts.push_back(fmt::to_string(histogram.counts[i]));
    begin_width = std::max(begin_width, begins.back().size());
    count_width = std::max(count_width, counts.back().size());
  }
  constexpr std::size_t most_columns = 60;
  constexpr std::size_t least_columns = 10;
  const std::size_t others = begin_width + count_width + 7;
  const std::size_t columns =
      style.width == 0 ? most_columns
                       : std::clamp(style.width > others ? style.width - others : 0, least_columns, most_columns);
  for (std::size_t i = 0; i < begins.size(); ++i) {
    const double part = static_cast<double>(histogram.counts[i]) / static_cast<double>(largest);
    const std::string blocks = bar(part, columns, style.is_unicode);
    fmt::format_to(std::back_inserter(out), "  {:>{}}  {:>{}}{}{}\n", begins[i], begin_width, counts[i], count_width,
                   blocks.empty() ? "" : "  ", blocks);
  }
}

std::vector<TensorStatistics> of_chosen(const Source& source, const StatsOptions& options) {
  return statistics(*source.tensors, matching(source, options.pattern), options.bins, options.progress);
}

}  // namespace

std::string stats_text(const Source& source, const StatsOptions& options) {
  const std::vector<TensorStatistics> all = of_chosen(source, options);
  std::string out;
  const bool is_alone = all.size() == 1;
  // A narrow terminal fits names only if the numbers are short.
  constexpr std::size_t narrow = 110;
  const bool is_narrow = options.style.width != 0 && options.style.width < narrow;
  const int digits = is_narrow ? 4 : 5;
  const std::size_t longest = is_narrow ? 10 : 20;
  std::vector<TextTable::Column> columns = {{"NAME"}, {"DTYPE"}};
  if (!is_narrow) columns.push_back({"VALUES", Align::right});
  for (const char* title : {"MIN", "MAX", "MEAN", is_narrow ? "DEV" : "DEVIATION", "ZEROS", "NAN", "INF"})
    columns.push_back({title, Align::right});
  TextTable table(std::move(columns), {0});
  std::uint64_t bytes = 0;
  std::uint64_t values = 0;
  std::uint64_t suspicious = 0;
  for (const TensorStatistics& tensor : all) {
    const bool has_numbers = tensor.finite() != 0;
    std::vector<std::string> cells = {printable(tensor.tensor.name), std::string(to_string(tensor.tensor.dtype))};
    if (!is_narrow) cells.push_back(fmt::to_string(tensor.values));
    cells.push_back(short_number(tensor.minimum, digits, longest));
    cells.push_back(short_number(tensor.maximum, digits, longest));
    cells.push_back(has_numbers ? short_number(tensor.mean, digits) : "-");
    cells.push_back(has_numbers ? short_number(tensor.deviation, digits) : "-");
    cells.push_back(percent(tensor.zeros, tensor.values));
    cells.push_back(fmt::to_string(tensor.nans));
    cells.push_back(fmt::to_string(tensor.infinities));
    table.add(cells);
    bytes += tensor.tensor.bytes;
    values += tensor.values;
    suspicious += tensor.nans + tensor.infinities != 0 ? 1 : 0;
  }
  if (!table.empty()) table.append_to(out, options.style);
  for (const TensorStatistics& tensor : all) {
    if (!is_alone && !options.has_histograms) break;
    out += '\n';
    if (!is_alone) out += printable(tensor.tensor.name) + "\n";
    append_histogram(out, tensor, options.style);
  }
  fmt::format_to(std::back_inserter(out), "{}{}, {}, {}", all.empty() ? "" : "\n", counted(all.size(), "tensor"),
                 counted(values, "value"), human_bytes(bytes));
  if (suspicious != 0)
    out += ", " + coloured(options.style, Colour::bad, fmt::format("{} with NaN or infinities", suspicious));
  out += '\n';
  return out + omissions_line(source);
}

Config stats_tree(const Source& source, const StatsOptions& options) {
  const auto number = [](const Config& value) {
    return value.type() == Config::Type::real ? json_number(value.as_double()) : value;
  };
  const auto tensor_tree = [&](const TensorStatistics& tensor) {
    const Histogram& histogram = tensor.histogram;
    const bool has_numbers = tensor.finite() != 0;
    const auto if_any = [&](double value) { return has_numbers ? json_number(value) : Config(); };
    return Config::object(
        {{"name", tensor.tensor.name},
         {"dtype", to_string(tensor.tensor.dtype)},
         {"shape", extents_of(tensor.tensor.shape)},
         {"bytes", tensor.tensor.bytes},
         {"values", tensor.values},
         {"nans", tensor.nans},
         {"infinities", tensor.infinities},
         {"zeros", tensor.zeros},
         {"minimum", number(tensor.minimum)},
         {"maximum", number(tensor.maximum)},
         {"mean", if_any(tensor.mean)},
         {"deviation", if_any(tensor.deviation)},
         {"histogram", Config::object({{"low", if_any(histogram.low)},
                                       {"high", if_any(histogram.high)},
                                       {"counts", ConfigArray(histogram.counts.begin(), histogram.counts.end())}})}});
  };
  return Config::object({{"tensors", list_of(of_chosen(source, options), tensor_tree)},
                         {"not_readable", count_lost(source.tensors->omissions())}});
}

}  // namespace muster::inspect
