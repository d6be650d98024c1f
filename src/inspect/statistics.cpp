// SPDX-License-Identifier: Apache-2.0
// Values of at most 16 bits are counted by bit pattern, and all statistics are derived from the counts, exactly and in
// one pass. Wider values need two passes: moments and range first, then the bins between the smallest and the largest
// value.

#include "src/inspect/statistics.hpp"
#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include "src/checkpoint/assembly/export.hpp"
#include "src/core/thread_pool.hpp"
#include "src/inspect/elements.hpp"

namespace muster::inspect {
namespace {

constexpr std::uint64_t counted_at_once = std::uint64_t{6} << 20;  // a multiple of every group of packed elements
constexpr std::size_t block = 4096;

bool is_narrow(DType dtype) noexcept {
  return bits(dtype) <= 16;
}

struct CountedPiece {
  std::size_t place = 0;  // index of the tensor in the result
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

std::uint64_t values_of(const TensorEntry& entry) {
  return static_cast<std::uint64_t>(element_count(entry.shape)) * values_per_element(entry.dtype);
}

/// Returns the number of values in a piece. The last byte of a packed tensor may be partly used.
std::uint64_t values_of(const TensorEntry& entry, const CountedPiece& piece) {
  return std::min(values_in(entry.dtype, piece.bytes), values_of(entry) - values_in(entry.dtype, piece.offset));
}

/// Number, mean and sum of squared distances from the mean. Two sets can be combined (Chan, Golub, LeVeque 1979).
struct Moments {
  std::uint64_t count = 0;
  long double mean = 0;
  long double squares = 0;

  void add(const Moments& other) noexcept {
    if (other.count == 0) return;
    const auto mine = static_cast<long double>(count);
    const auto others = static_cast<long double>(other.count);
    const long double apart = other.mean - mean;
    count += other.count;
    const auto all = static_cast<long double>(count);
    mean += apart * (others / all);
    squares += other.squares + apart * apart * (mine * others / all);
  }
};

struct PieceFacts {
  std::uint64_t nans = 0;
  std::uint64_t infinities = 0;
  std::uint64_t zeros = 0;
  std::uint64_t low = 0;  // bits of the smallest and the largest finite value
  std::uint64_t high = 0;
  Moments moments = {};
};

template <class T>
PieceFacts facts_of(std::span<const std::byte> bytes, std::uint64_t values) {
  // Sums of f32 are far within the range of a double; those of f64 and of large integers are not.
  using Sum = std::conditional_t<std::is_same_v<T, float>, double, long double>;
  PieceFacts facts;
  T low = std::numeric_limits<T>::max();
  T high = std::numeric_limits<T>::lowest();
  T buffer[block];
  for (std::uint64_t at = 0; at < values; at += block) {
    const std::size_t count = std::min<std::uint64_t>(block, values - at);
    std::memcpy(buffer, bytes.data() + at * sizeof(T), count * sizeof(T));
    std::size_t kept = count;
    if constexpr (std::is_floating_point_v<T>) {
      kept = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const T value = buffer[i];
        facts.nans += std::isnan(value) ? 1 : 0;
        facts.infinities += std::isinf(value) ? 1 : 0;
        buffer[kept] = value;
        kept += std::isfinite(value) ? 1 : 0;
      }
    }
    if (kept == 0) continue;
    Sum sum = 0;
    for (std::size_t i = 0; i < kept; ++i) {
      const T value = buffer[i];
      facts.zeros += value == 0 ? 1 : 0;
      low = std::min(low, value);
      high = std::max(high, value);
      sum += static_cast<Sum>(value);
    }
    const Sum mean = sum / static_cast<Sum>(kept);
    Sum squares = 0;
    for (std::size_t i = 0; i < kept; ++i)
      squares += (static_cast<Sum>(buffer[i]) - mean) * (static_cast<Sum>(buffer[i]) - mean);
    facts.moments.add({kept, static_cast<long double>(mean), static_cast<long double>(squares)});
  }
  std::memcpy(&facts.low, &low, sizeof low);
  std::memcpy(&facts.high, &high, sizeof high);
  return facts;
}

template <class T>
void count_bins(std::span<const std::byte> bytes, std::uint64_t values, T low, T high,
                std::vector<std::uint64_t>& counts) {
  // The lowest integer is subtracted first, because as doubles, large neighbours would be equal.
  using Distance = std::conditional_t<std::is_same_v<T, float>, double, long double>;
  const auto distance = [](T from, T to) -> Distance {
    if constexpr (std::is_integral_v<T>) {
      using Unsigned = std::make_unsigned_t<T>;
      return static_cast<Distance>(static_cast<Unsigned>(static_cast<Unsigned>(to) - static_cast<Unsigned>(from)));
    } else {
      return static_cast<Distance>(to) - static_cast<Distance>(from);
    }
  };
  const Distance scale = static_cast<Distance>(counts.size()) / distance(low, high);
  for (std::uint64_t i = 0; i < values; ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    if constexpr (std::is_floating_point_v<T>)
      if (!std::isfinite(value)) continue;
    ++counts[std::min(static_cast<std::size_t>(distance(low, value) * scale), counts.size() - 1)];
  }
}

/// Calls work(T) with the type of a wide dtype's values.
template <class StatisticsWork>
auto with_type(DType dtype, StatisticsWork&& work) {
  switch (value_dtype(dtype)) {
    case DType::u32:
      return work(std::uint32_t{});
    case DType::i32:
      return work(std::int32_t{});
    case DType::u64:
      return work(std::uint64_t{});
    case DType::i64:
      return work(std::int64_t{});
    case DType::f32:
      return work(float{});
    default:
      return work(double{});
  }
}

template <class T>
T from_bits(std::uint64_t word) noexcept {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// Fewer values are sorted instead, because clearing and searching a table of all patterns would take longer.
constexpr std::uint64_t least_counted = 8192;

using PatternCount = std::pair<std::uint32_t, std::uint64_t>;

std::size_t bin_of(double value, double low, double high, std::size_t bins) noexcept {
  // Halves, because the distance of two large doubles may overflow.
  const double part = (value / 2 - low / 2) / (high / 2 - low / 2);
  return std::min(static_cast<std::size_t>(part * static_cast<double>(bins)), bins - 1);
}

void finish_counts(TensorStatistics& out, const std::vector<PatternCount>& counts, std::size_t bins) {
  const DType dtype = out.tensor.dtype;
  std::optional<std::pair<double, std::uint32_t>> low;
  std::optional<std::pair<double, std::uint32_t>> high;
  long double sum = 0;
  for (const auto& [pattern, count] : counts) {
    const double value = value_of(dtype, pattern);
    if (std::isnan(value)) {
      out.nans += count;
    } else if (std::isinf(value)) {
      out.infinities += count;
    } else {
      if (value == 0) out.zeros += count;
      if (!low || value < low->first) low = {value, pattern};
      if (!high || value > high->first) high = {value, pattern};
      sum += static_cast<long double>(value) * static_cast<long double>(count);
    }
  }
  if (!low) return;
  const auto finite = static_cast<long double>(out.finite());
  const long double mean = sum / finite;
  long double squares = 0;
  out.histogram = {low->first, high->first, std::vector<std::uint64_t>(low->first < high->first ? bins : 1)};
  for (const auto& [pattern, count] : counts) {
    const double value = value_of(dtype, pattern);
    if (!std::isfinite(value)) continue;
    squares += (static_cast<long double>(value) - mean) * (static_cast<long double>(value) - mean) *
               static_cast<long double>(count);
    out.histogram.counts[low->first < high->first ? bin_of(value, low->first, high->first, bins) : 0] += count;
  }
  out.minimum = exact_value(dtype, low->second);
  out.maximum = exact_value(dtype, high->second);
  out.mean = static_cast<double>(mean);
  out.deviation = static_cast<double>(std::sqrt(squares / finite));
}

std::vector<PatternCount> sorted_counts(DType dtype, std::span<const std::byte> bytes, std::uint64_t values) {
  std::map<std::uint32_t, std::uint64_t> counts;
  for (std::uint64_t i = 0; i < values; ++i) ++counts[static_cast<std::uint32_t>(value_bits(dtype, bytes, i))];
  return {counts.begin(), counts.end()};
}

std::vector<PatternCount> taken_from(const std::vector<std::uint64_t>& table) {
  std::vector<PatternCount> counts;
  for (std::size_t pattern = 0; pattern < table.size(); ++pattern)
    if (table[pattern] != 0) counts.emplace_back(static_cast<std::uint32_t>(pattern), table[pattern]);
  return counts;
}

void count_patterns(DType dtype, std::span<const std::byte> bytes, std::uint64_t values,
                    std::vector<std::uint64_t>& table) {
  if (bits(dtype) == 16) {
    for (std::uint64_t i = 0; i < values; ++i) {
      std::uint16_t word = 0;
      std::memcpy(&word, bytes.data() + i * 2, 2);
      ++table[word];
    }
  } else if (bits(dtype) == 8) {
    // A second table: with a single one, equal neighbours would each wait for the previous increment.
    std::vector<std::uint64_t> other(256);
    for (std::uint64_t i = 0; i + 1 < values; i += 2) {
      ++table[std::to_integer<std::size_t>(bytes[i])];
      ++other[std::to_integer<std::size_t>(bytes[i + 1])];
    }
    if (values % 2 != 0) ++table[std::to_integer<std::size_t>(bytes[values - 1])];
    for (std::size_t i = 0; i < other.size(); ++i) table[i] += other[i];
  } else {
    for (std::uint64_t i = 0; i < values; ++i) ++table[value_bits(dtype, bytes, i)];
  }
}

class StatisticsWork {
 public:
  StatisticsWork(const TensorSource& source, const std::vector<std::size_t>& tensors, std::size_t bins,
                 const ProgressCallback& progress)
      : source_(source), tensors_(tensors), bins_(bins) {
    std::uint64_t total = 0;
    out_.reserve(tensors.size());
    for (const std::size_t tensor : tensors) {
      const TensorEntry& entry = source.tensors()[tensor];
      const std::size_t place = out_.size();
      out_.push_back({.tensor = entry, .values = values_of(entry)});
      std::vector<CountedPiece>& pieces = is_narrow(entry.dtype) ? narrow_ : wide_;
      for (std::uint64_t at = 0; at < entry.bytes; at += counted_at_once)
        pieces.push_back({place, at, std::min(counted_at_once, entry.bytes - at)});
      total += entry.bytes * (is_narrow(entry.dtype) ? 1 : 2);
    }
    ends_.resize(out_.size());
    progress_.emplace(progress, total);
  }

  std::vector<TensorStatistics> run() {
    count_narrow();
    measure_wide();
    fill_bins();
    return std::move(out_);
  }

 private:
  template <class Use>
  void for_each(const std::vector<CountedPiece>& pieces, Use&& use) {
    parallel_for(pieces.size(), workers_, [&](std::size_t index, std::size_t worker) {
      const CountedPiece& piece = pieces[index];
      use(index, source_.read_piece(tensors_[piece.place], piece.offset, piece.bytes, memory_[worker]));
      progress_->add(piece.bytes);
    });
  }

  // Several threads count the pieces of one tensor.
  void count_narrow() {
    std::vector<std::size_t> left(out_.size());  // number of pieces of each tensor that are not counted yet
    for (const CountedPiece& piece : narrow_) ++left[piece.place];
    std::vector<std::vector<std::uint64_t>> shared(out_.size());  // by pattern, for unfinished tensors
    std::mutex mutex;
    for_each(narrow_, [&](std::size_t index, std::span<const std::byte> bytes) {
      const CountedPiece& piece = narrow_[index];
      TensorStatistics& out = out_[piece.place];
      const DType dtype = out.tensor.dtype;
      const std::uint64_t values = values_of(out.tensor, piece);
      if (values == out.values && values < least_counted)
        return finish_counts(out, sorted_counts(dtype, bytes, values), bins_);
      std::vector<std::uint64_t> table(std::size_t{1} << bits(dtype));
      count_patterns(dtype, bytes, values, table);
      {
        const std::lock_guard lock(mutex);
        std::vector<std::uint64_t>& before = shared[piece.place];
        for (std::size_t i = 0; i < before.size(); ++i) table[i] += before[i];
        before = std::move(table);
        if (--left[piece.place] != 0) return;
        table = std::exchange(before, {});
      }
      finish_counts(out, taken_from(table), bins_);
    });
  }

  void measure_wide() {
    std::vector<PieceFacts> facts(wide_.size());
    for_each(wide_, [&](std::size_t index, std::span<const std::byte> bytes) {
      const TensorEntry& entry = out_[wide_[index].place].tensor;
      facts[index] =
          with_type(entry.dtype, [&]<class T>(T) { return facts_of<T>(bytes, values_of(entry, wide_[index])); });
    });
    for (std::size_t begin = 0, end = 0; begin < wide_.size(); begin = end) {
      while (end < wide_.size() && wide_[end].place == wide_[begin].place) ++end;
      TensorStatistics& out = out_[wide_[begin].place];
      with_type(out.tensor.dtype, [&]<class T>(T) { put_together<T>(out, {facts.data() + begin, end - begin}); });
    }
  }

  template <class T>
  void put_together(TensorStatistics& out, std::span<const PieceFacts> facts) {
    Moments moments;
    T low = std::numeric_limits<T>::max();
    T high = std::numeric_limits<T>::lowest();
    for (const PieceFacts& piece : facts) {
      out.nans += piece.nans;
      out.infinities += piece.infinities;
      out.zeros += piece.zeros;
      moments.add(piece.moments);
      low = std::min(low, from_bits<T>(piece.low));
      high = std::max(high, from_bits<T>(piece.high));
    }
    if (moments.count == 0) return;
    std::uint64_t bits_of_low = 0;
    std::uint64_t bits_of_high = 0;
    std::memcpy(&bits_of_low, &low, sizeof low);
    std::memcpy(&bits_of_high, &high, sizeof high);
    const DType dtype = value_dtype(out.tensor.dtype);
    out.minimum = exact_value(dtype, bits_of_low);
    out.maximum = exact_value(dtype, bits_of_high);
    out.mean = static_cast<double>(moments.mean);
    out.deviation = static_cast<double>(std::sqrt(moments.squares / static_cast<long double>(moments.count)));
    out.histogram = {static_cast<double>(low), static_cast<double>(high),
                     std::vector<std::uint64_t>(low < high ? bins_ : 1)};
    if (low < high)
      ends_[static_cast<std::size_t>(&out - out_.data())] = {bits_of_low, bits_of_high};
    else
      out.histogram.counts.front() = moments.count;
  }

  void fill_bins() {
    std::mutex mutex;
    for_each(wide_, [&](std::size_t index, std::span<const std::byte> bytes) {
      TensorStatistics& out = out_[wide_[index].place];
      const std::optional<std::pair<std::uint64_t, std::uint64_t>>& ends = ends_[wide_[index].place];
      if (!ends) return;
      std::vector<std::uint64_t> counts(bins_);
      with_type(out.tensor.dtype, [&]<class T>(T) {
        count_bins<T>(bytes, values_of(out.tensor, wide_[index]), from_bits<T>(ends->first), from_bits<T>(ends->second),
                      counts);
      });
      const std::lock_guard lock(mutex);
      for (std::size_t i = 0; i < bins_; ++i) out.histogram.counts[i] += counts[i];
    });
  }

  const TensorSource& source_;
  const std::vector<std::size_t>& tensors_;
  std::size_t bins_;
  std::optional<ProgressCounter> progress_;
  std::size_t workers_ = copy_workers();
  std::vector<std::vector<std::byte>> memory_ = std::vector<std::vector<std::byte>>(workers_);  // buffers for pieces
  std::vector<TensorStatistics> out_;
  /// Bits of the smallest and the largest value, for each wide tensor in which they differ.
  std::vector<std::optional<std::pair<std::uint64_t, std::uint64_t>>> ends_;
  std::vector<CountedPiece> narrow_;
  std::vector<CountedPiece> wide_;
};

}  // namespace

std::vector<TensorStatistics> statistics(const TensorSource& source, const std::vector<std::size_t>& tensors,
                                         std::size_t bins, const ProgressCallback& progress) {
  return StatisticsWork(source, tensors, bins, progress).run();
}

double number_of(const Config& value) {
  return value.type() == Config::Type::boolean ? static_cast<double>(value.as_bool()) : value.as_double();
}

namespace {

/// Compares numbers; integers exactly.
bool is_less(const Config& a, const Config& b) {
  const auto is_signed = [](const Config& value) { return value.type() == Config::Type::integer; };
  const auto is_unsigned = [](const Config& value) { return value.type() == Config::Type::unsigned_integer; };
  if (is_signed(a) && is_signed(b)) return a.as_int() < b.as_int();
  if (is_signed(a) && is_unsigned(b)) return std::cmp_less(a.as_int(), b.as_uint());
  if (is_unsigned(a) && is_signed(b)) return std::cmp_less(a.as_uint(), b.as_int());
  if (is_unsigned(a) && is_unsigned(b)) return a.as_uint() < b.as_uint();
  return number_of(a) < number_of(b);
}

void add_counts(Histogram& target, const Histogram& source) {
  const auto bins = static_cast<long double>(target.counts.size());
  const long double width = static_cast<long double>(target.high) - static_cast<long double>(target.low);
  for (std::size_t i = 0; i < source.counts.size(); ++i) {
    const long double part = (static_cast<long double>(i) + 0.5L) / static_cast<long double>(source.counts.size());
    const long double middle = source.low * (1 - part) + source.high * part;
    const long double place = width > 0 ? (middle - target.low) / width * bins : 0;
    target.counts[static_cast<std::size_t>(std::clamp(place, 0.0L, bins - 1))] += source.counts[i];
  }
}

}  // namespace

TensorStatistics pooled(const std::vector<const TensorStatistics*>& members, std::size_t bins) {
  if (members.size() == 1) return *members.front();
  TensorStatistics all{.tensor = members.front()->tensor};
  Moments moments;
  for (const TensorStatistics* one : members) {
    all.values += one->values;
    all.nans += one->nans;
    all.infinities += one->infinities;
    all.zeros += one->zeros;
    if (one->finite() == 0) continue;
    if (moments.count == 0 || is_less(one->minimum, all.minimum)) all.minimum = one->minimum;
    if (moments.count == 0 || is_less(all.maximum, one->maximum)) all.maximum = one->maximum;
    const auto deviation = static_cast<long double>(one->deviation);
    moments.add({one->finite(), one->mean, deviation * deviation * static_cast<long double>(one->finite())});
  }
  if (moments.count == 0) return all;
  all.mean = static_cast<double>(moments.mean);
  all.deviation = static_cast<double>(std::sqrt(moments.squares / static_cast<long double>(moments.count)));
  const double low = number_of(all.minimum);
  const double high = number_of(all.maximum);
  all.histogram = {low, high, std::vector<std::uint64_t>(low < high ? bins : 1)};
  for (const TensorStatistics* one : members) add_counts(all.histogram, one->histogram);
  return all;
}

// The output of `muster stats`.
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
  std::vector<std::size_t> places = matching(source, options.filter);
  const std::vector<TensorEntry>& entries = source.entries();
  if (options.order == StatsOrder::name)
    std::ranges::sort(places, {}, [&](std::size_t place) -> std::string_view { return entries[place].name; });
  if (options.order == StatsOrder::size)
    std::ranges::stable_sort(places, std::greater(), [&](std::size_t place) { return entries[place].bytes; });
  return statistics(*source.tensors, places, options.bins, options.progress);
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

void stats_json(const Source& source, const StatsOptions& options, const Sink& sink) {
  const auto tensor_tree = [](const TensorStatistics& tensor) {
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
         {"minimum", json_number(tensor.minimum)},
         {"maximum", json_number(tensor.maximum)},
         {"mean", if_any(tensor.mean)},
         {"deviation", if_any(tensor.deviation)},
         {"histogram", Config::object({{"low", if_any(histogram.low)},
                                       {"high", if_any(histogram.high)},
                                       {"counts", ConfigArray(histogram.counts.begin(), histogram.counts.end())}})}});
  };
  const std::vector<TensorStatistics> all = of_chosen(source, options);
  json_report_with_list(
      Config::object({{"tensors", ConfigArray()}, {"not_readable", count_lost(source.tensors->omissions())}}),
      "tensors", all.size(), [&](std::size_t i) { return tensor_tree(all[i]); }, sink);
}

}  // namespace muster::inspect
