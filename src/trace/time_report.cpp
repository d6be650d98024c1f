// SPDX-License-Identifier: Apache-2.0
#include "muster/trace.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"

namespace muster {
namespace {

/// The steps of each rank by their names. A job may have many: programs put numbers into names.
class StepIndex {
 public:
  /// Throws Error(invalid_argument) if a rank has a step twice, or a time is negative or not a number.
  explicit StepIndex(std::span<const RankTimes> ranks) : of_rank_(ranks.size()) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank)
      for (const StepTimes& times : ranks[rank]) {
        if (!of_rank_[rank].try_emplace(times.step, &times).second)
          throw Error(ErrorKind::invalid_argument,
                      fmt::format("rank {}: step {} occurs twice", rank, in_quotes(times.step)));
        if (!std::ranges::all_of(times.seconds, [](double time) { return std::isfinite(time) && time >= 0; }))
          throw Error(
              ErrorKind::invalid_argument,
              fmt::format("rank {}: step {}: a time must be in seconds and at least 0", rank, in_quotes(times.step)));
        if (known_.insert(times.step).second) steps_.push_back(times.step);
      }
  }

  /// The steps of all ranks, each once, in the order of their first occurrence.
  [[nodiscard]] const std::vector<std::string>& steps() const noexcept { return steps_; }
  /// Returns null if the rank does not have the step.
  [[nodiscard]] const StepTimes* find(std::size_t rank, const std::string& step) const {
    const auto found = of_rank_[rank].find(step);
    return found == of_rank_[rank].end() ? nullptr : found->second;
  }

 private:
  std::vector<std::unordered_map<std::string_view, const StepTimes*>> of_rank_;
  std::unordered_set<std::string_view> known_;
  std::vector<std::string> steps_;
};

double sum(const std::vector<double>& seconds) {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

}  // namespace

ImbalanceReport report_load_imbalance(std::span<const RankTimes> ranks) {
  ImbalanceReport report;
  const StepIndex index(ranks);
  for (const std::string& step : index.steps()) {
    std::vector<const std::vector<double>*> times;
    std::string missing;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (const StepTimes* found = index.find(rank, step))
        times.push_back(&found->seconds);
      else
        missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
    }
    if (!missing.empty()) {
      report.warnings.push_back(
          fmt::format("step {} is left out: it is missing on ranks {}", in_quotes(step), missing));
      continue;
    }
    const auto [fewest, most] = std::ranges::minmax(times, {}, [](const auto* each) { return each->size(); });
    StepImbalance imbalance{step, fewest->size()};
    if (fewest->size() != most->size())
      report.warnings.push_back(fmt::format("step {}: only the first {} iterations count: some ranks have {}",
                                            in_quotes(step), fewest->size(), most->size()));
    for (std::size_t i = 0; i < imbalance.iterations; ++i) {
      double total = 0;
      double longest = 0;
      for (const auto* each : times) {
        total += (*each)[i];
        longest = std::max(longest, (*each)[i]);
      }
      const double mean = total / static_cast<double>(times.size());
      imbalance.useful_seconds += mean;
      imbalance.waiting_seconds += longest - mean;
    }
    report.useful_seconds += imbalance.useful_seconds;
    report.waiting_seconds += imbalance.waiting_seconds;
    report.steps.push_back(std::move(imbalance));
  }
  return report;
}

std::string to_string(const ImbalanceReport& report) {
  const auto line = [](const std::string& name, double useful, double waiting) {
    const double all = useful + waiting;
    return fmt::format("{}: {:.6f} s useful, {:.6f} s waiting ({:.1f} %)\n", name, useful, waiting,
                       all > 0 ? waiting / all * 100 : 0.0);
  };
  std::string text;
  for (const StepImbalance& step : report.steps)
    text += line(fmt::format("{} ({} times)", step.step, step.iterations), step.useful_seconds, step.waiting_seconds);
  text += line("all steps", report.useful_seconds, report.waiting_seconds);
  for (const std::string& warning : report.warnings) text += "warning: " + warning + "\n";
  return text;
}

TimeReport report_time_info(std::span<const RankTimes> ranks) {
  TimeReport report;
  const StepIndex index(ranks);
  for (const std::string& step : index.steps()) {
    StepTimeInfo info{.step = step,
                      .mean_seconds = std::vector<double>(ranks.size()),
                      .total_seconds = std::vector<double>(ranks.size()),
                      .iterations = std::vector<std::size_t>(ranks.size())};
    std::size_t having = 0;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const StepTimes* const found = index.find(rank, step);
      if (found == nullptr) continue;
      ++having;
      const double total = sum(found->seconds);
      info.iterations[rank] = found->seconds.size();
      info.total_seconds[rank] = total;
      if (!found->seconds.empty()) info.mean_seconds[rank] = total / static_cast<double>(found->seconds.size());
      info.largest_total = std::max(info.largest_total, total);
      info.mean_total += total;
    }
    info.mean_total /= static_cast<double>(having);
    report.steps.push_back(std::move(info));
  }
  return report;
}

std::string to_string(const TimeReport& report) {
  std::string text;
  for (const StepTimeInfo& step : report.steps) {
    for (std::size_t rank = 0; rank < step.iterations.size(); ++rank)
      if (step.iterations[rank] != 0)
        text += fmt::format("{}, rank {}: mean {:.6f} s, total {:.6f} s\n", step.step, rank, step.mean_seconds[rank],
                            step.total_seconds[rank]);
    text += fmt::format("{}: largest total {:.6f} s, mean total {:.6f} s\n", step.step, step.largest_total,
                        step.mean_total);
  }
  return text;
}

}  // namespace muster
