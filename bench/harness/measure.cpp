// SPDX-License-Identifier: Apache-2.0
#include "bench/harness/measure.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "bench/harness/copy_kernels.hpp"

namespace bench {

namespace {

void call(const std::function<void()>& step) {
  if (step) {
    step();
  }
}

constexpr std::size_t most_contenders = 32;

bool is_finished(const Meeting& meeting, std::size_t which) {
  return (meeting.block().finished.load() >> which & 1U) != 0;
}

// Only rank 0 decides. The other ranks see the result after the barrier that ends the repetition.
void finish_if_spent(const Meeting& meeting, std::size_t which, const Samples& samples, double limit) {
  constexpr std::size_t enough = 3;
  double spent = 0;
  for (const double seconds : samples.access_seconds) {
    spent += seconds;
  }
  if (samples.access_seconds.size() >= enough && spent > limit) {
    meeting.block().finished.fetch_or(std::uint32_t{1} << which);
  }
}

void run_once(Meeting& meeting, const Contender& contender, std::span<std::byte> source, Samples* samples,
              const std::function<void()>& judge) {
  MeetingBlock& block = meeting.block();
  const auto me = static_cast<std::size_t>(meeting.rank());
  call(contender.prepare);
  block.expected_sum[me] += touch(source, 1);

  meeting.wait();  // all ranks have prepared, so their usage does not include the preparation
  const Usage before = usage_now();
  const std::int64_t start = meeting.wait();
  call(contender.move);
  const std::int64_t access = now_ns();
  block.usage[me] = usage_now() - before;
  if (meeting.is_first() && contender.read) {
    const std::uint64_t sum = contender.read();
    const std::int64_t read = now_ns();
    std::uint64_t expected = 0;
    for (int rank = 0; rank < meeting.size(); ++rank) {
      expected += block.expected_sum[rank];
    }
    if (sum != expected) {
      throw std::runtime_error(fmt::format("{}: the first rank read other bytes than were sent", contender.name));
    }
    if (samples != nullptr) {
      samples->read_seconds.push_back(static_cast<double>(read - start) * 1e-9);
    }
  }
  meeting.wait();
  if (samples != nullptr && meeting.is_first()) {
    samples->access_seconds.push_back(static_cast<double>(access - start) * 1e-9);
    samples->first_usage.push_back(block.usage[0]);
    Usage senders;
    for (int rank = 1; rank < meeting.size(); ++rank) {
      senders += block.usage[rank];
    }
    samples->sender_usage.push_back(senders);
  }
  call(contender.finish);
  if (samples != nullptr && meeting.is_first()) {
    judge();
  }
  meeting.wait();
}

}  // namespace

std::vector<Samples> measure(Meeting& meeting, std::span<std::byte> source, const std::vector<Contender>& contenders,
                             const MeasureOptions& options) {
  for (std::size_t at = 0; at + sizeof(std::uint64_t) <= source.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = at * 0x9e3779b97f4a7c15U + static_cast<std::uint64_t>(meeting.rank());
    std::memcpy(source.data() + at, &word, sizeof word);
  }
  meeting.block().expected_sum[meeting.rank()] = sum_words(source);
  if (contenders.size() > most_contenders) {
    throw std::invalid_argument("measure: too many contenders");
  }
  meeting.block().finished.store(0);
  meeting.wait();

  std::vector<Samples> all(contenders.size());
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    all[i].name = contenders[i].name;
  }
  for (int repetition = -options.warm_up; repetition < options.repetitions; ++repetition) {
    const auto turn = static_cast<std::size_t>(repetition + options.warm_up);
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      const std::size_t which = (i + turn) % contenders.size();
      if (!is_finished(meeting, which)) {
        run_once(meeting, contenders[which], source, repetition < 0 ? nullptr : &all[which],
                 [&] { finish_if_spent(meeting, which, all[which], options.seconds_each); });
      }
    }
  }
  return all;
}

int default_repetitions(std::uint64_t total_bytes) {
  constexpr std::uint64_t enough = std::uint64_t{16} << 30;
  return static_cast<int>(std::clamp<std::uint64_t>(enough / std::max<std::uint64_t>(total_bytes, 1), 5, 101));
}

double median(std::vector<double> values) {
  if (values.empty()) {
    return std::nan("");
  }
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace bench
