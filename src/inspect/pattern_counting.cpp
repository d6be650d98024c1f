// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/pattern_counting.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "src/inspect/elements.hpp"

namespace muster::inspect {
namespace {

// Fewer values are sorted: clearing and searching a table of all patterns would take longer.
constexpr std::uint64_t least_counted = 8192;

using PatternCount = std::pair<std::uint32_t, std::uint64_t>;

std::size_t bin_of(double value, double low, double high, std::size_t bins) noexcept {
  // Halves, because the distance of two large doubles need not be one.
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
  std::vector<std::uint32_t> patterns(values);
  for (std::uint64_t i = 0; i < values; ++i) patterns[i] = static_cast<std::uint32_t>(value_bits(dtype, bytes, i));
  std::sort(patterns.begin(), patterns.end());
  std::vector<PatternCount> counts;
  for (const std::uint32_t pattern : patterns) {
    if (counts.empty() || counts.back().first != pattern) counts.emplace_back(pattern, 0);
    ++counts.back().second;
  }
  return counts;
}

std::vector<PatternCount> taken_from(std::vector<std::uint64_t>& table) {
  std::vector<PatternCount> counts;
  for (std::size_t pattern = 0; pattern < table.size(); ++pattern)
    if (table[pattern] != 0) counts.emplace_back(static_cast<std::uint32_t>(pattern), table[pattern]);
  table.clear();
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
    // Equal neighbours would wait for each other's count.
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

}  // namespace

PatternCounting::PatternCounting(std::vector<TensorStatistics>& out, std::vector<std::size_t> pieces,
                                 std::size_t workers, std::size_t bins)
    : out_(out), bins_(bins), left_(std::move(pieces)), shared_(out.size()), workers_(workers) {}

void PatternCounting::count(std::size_t place, std::span<const std::byte> bytes, std::uint64_t values,
                            std::size_t worker) {
  TensorStatistics& out = out_[place];
  const DType dtype = out.tensor.dtype;
  if (values == out.values && values < least_counted)
    return finish_counts(out, sorted_counts(dtype, bytes, values), bins_);
  Own& own = workers_[worker];
  if (own.pieces != 0 && own.place != place) hand_over(own);
  own.place = place;
  own.table.resize(std::size_t{1} << bits(dtype));
  count_patterns(dtype, bytes, values, own.table);
  ++own.pieces;
}

void PatternCounting::finish() {
  for (Own& own : workers_)
    if (own.pieces != 0) hand_over(own);
}

void PatternCounting::hand_over(Own& own) {
  TensorStatistics& out = out_[own.place];
  {
    const std::lock_guard lock(mutex_);
    Table& shared = shared_[own.place];
    if (!shared.empty())
      for (std::size_t i = 0; i < shared.size(); ++i) own.table[i] += shared[i];
    left_[own.place] -= std::exchange(own.pieces, 0);
    if (left_[own.place] != 0) {
      shared = std::exchange(own.table, {});
      return;
    }
    Table().swap(shared);
  }
  finish_counts(out, taken_from(own.table), bins_);
}

}  // namespace muster::inspect
