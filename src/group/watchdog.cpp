// SPDX-License-Identifier: Apache-2.0

#include "src/group/watchdog.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <new>
#include <string>
#include <thread>
#include "muster/error.hpp"
#include "muster/interrupt.hpp"
#include "muster/log.hpp"
#include "src/base/escaped.hpp"
#include "src/group/error_propagation.hpp"
#include "src/os/clock.hpp"
#include "src/os/process.hpp"
#include "src/trace/rings.hpp"

namespace muster::group {
namespace {

using Clock = os::Clock;

constexpr std::size_t most_named = 16;  // maximum number of ranks that one message names
constexpr const char* what_ranks_were_in = ". Inspect what each rank was doing (muster status)";

double seconds(Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

Watchdog::~Watchdog() {
  if (has_told_) parent_->tell_awaited(self_, 0);
}

void Watchdog::tell(int awaited) {
  if (parent_ == nullptr) return;
  has_told_ = true;
  parent_->tell_awaited(self_, static_cast<std::uint32_t>(awaited) + 1);
}

Watchdog::Chain Watchdog::chain_of(int rank) const {
  const Pulse& pulse = parent_ == nullptr ? group_ : *parent_;
  // In most cases the chain has one rank.
  if (pulse.awaited_by(rank) == 0) return {pulse.progress_of(rank), rank};
  std::vector<bool> seen(peers_.ranks->size());
  Chain chain{0, rank};
  for (int at = rank;;) {
    const auto index = static_cast<std::size_t>(at);
    if (index >= seen.size()) return chain;
    if (seen[index]) return {chain.progress, rank};
    seen[index] = true;
    chain.end = at;
    chain.progress += pulse.progress_of(at);
    const std::uint32_t next = pulse.awaited_by(at);
    if (next == 0) return chain;
    at = static_cast<int>(next - 1);
  }
}

void Watchdog::fail(const Error& cause) {
  group_.abort(cause);
  // Another rank may have failed the group first: all ranks throw the same cause.
  throw group_.error().value_or(cause);
}

void Watchdog::fail_with_ranks(const Error& cause) {
  // This is recorded before the other ranks learn of the failure and leave their operations.
  const trace::RanksAtFailure ranks(!group_.has_failure());
  group_.abort(cause);
  const Error first = group_.error().value_or(cause);
  ranks.keep(first.what());
  throw first;
}

std::string Watchdog::describe(int rank, const char* link) const {
  const RankInfo& info = (*peers_.ranks)[rank];
  return fmt::format("{}{}{}{}", name_of(info), link, peers_.state_of(rank), last_seen(rank, ", "));
}

std::string Watchdog::last_seen(int rank, const char* before) const {
  const std::string phase = group_.phase(rank);
  return phase.empty() ? phase : fmt::format("{}last seen in {}", before, in_quotes(phase));
}

bool Watchdog::check_failure(const std::function<bool()>& done) {
  if (group_.has_failure()) {
    const Error cause = *group_.error();
    // The failed rank may have done its part before it failed; the result can arrive after the failure because it uses
    // another channel.
    if (done()) return true;
    throw cause;
  }
  if (parent_ != nullptr && parent_->has_failure()) fail(*parent_->error());
  if (options_.stop.stop_requested()) cancel("cancelled");
  return false;
}

void Watchdog::cancel(const char* how) {
  const RankInfo& info = (*peers_.ranks)[self_];
  fail(error_of(info, ErrorKind::cancelled, fmt::format("{} {} {}", name_of(info), how, in_quotes(options_.phase))));
}

void Watchdog::time_out(std::vector<int> missing) {
  const auto is_stopped = [&](int rank) { return peers_.state_of(rank) == "stopped"; };
  const auto waits = [&](int rank) {
    const std::string phase = group_.phase(rank);
    return !phase.empty() && phase != between_calls;
  };
  // If all missing ranks wait too, they may wait for a stopped rank without having published this: it may forward their
  // packets.
  if (std::ranges::all_of(missing, waits) && std::ranges::none_of(missing, is_stopped)) {
    const std::span<const int> all = peers_.ranks->all();
    if (const auto found = std::ranges::find_if(all, is_stopped); found != all.end())
      missing.insert(missing.begin(), *found);
  }
  std::ranges::stable_partition(missing, is_stopped);
  std::string names;
  for (std::size_t i = 0; i < std::min(missing.size(), most_named); ++i)
    names += (i == 0 ? "" : "; ") + describe(missing[i], " made no progress: it is ");
  if (missing.size() > most_named) names += fmt::format(" and {} more", missing.size() - most_named);
  const RankInfo& first = (*peers_.ranks)[missing.front()];
  fail_with_ranks(
      error_of(first, ErrorKind::timeout,
               fmt::format("timeout: rank {} waited {:.1f} s in {}; {}. Inspect that process (muster status), or raise "
                           "MUSTER_TIMEOUT (seconds)",
                           number(self_), seconds(Clock::now() - begin_), in_quotes(options_.phase), names)));
}

int Watchdog::at_once() const noexcept {
  const int size = static_cast<int>(peers_.ranks->size());
  return std::max(least_at_once, (size + turns - 1) / turns);
}

template <class Wants, class Look>
void Watchdog::take_turn(int& at, const Wants& wants, const Look& look) const {
  const int size = static_cast<int>(peers_.ranks->size());
  int left = at_once();
  for (int passed = 0; passed < size && left > 0; ++passed) {
    at = at + 1 == size ? 0 : at + 1;
    if (at == self_ || !wants(at)) continue;
    --left;
    if (!look(at)) return;
  }
}

bool Watchdog::is_over(int rank, const std::function<bool()>& done) {
  const bool left = group_.has_left(rank);
  const std::optional<std::string> end = left ? "left the group" : peers_.end_of(rank);
  if (!end) return false;
  if (done() || check_failure(done)) return true;
  // A rank that never entered the group ended because rank 0 did not give it the data for that.
  if (rank != 0 && group_.phase(rank).empty() && peers_.end_of(0)) rank = 0;
  const RankInfo& info = (*peers_.ranks)[rank];
  fail_with_ranks(error_of(info, ErrorKind::peer_lost,
                           fmt::format("{} {} while rank {} was in {}{}{}", name_of(info), *end, number(self_),
                                       in_quotes(options_.phase), last_seen(rank, "; it was "), what_ranks_were_in)));
}

bool Watchdog::is_late(int rank, Clock::time_point now) {
  Seen& seen = seen_[static_cast<std::size_t>(rank)];
  const Chain chain = chain_of(rank);
  if (chain.progress != seen.progress) {
    seen = {chain.progress, now};
    any_moves_ = true;
  }
  return now - seen.since > timeout_;
}

void Watchdog::check(const std::function<bool()>& done, const std::function<bool(int)>& needed,
                     const std::function<bool(int)>& awaited) {
  if (check_failure(done)) return;
  const Clock::time_point now = Clock::now();
  if (now - looked_ < slice) return;
  looked_ = now;
  if (is_interrupted()) cancel("was interrupted in");
  try {
    look(now, done, needed, awaited);
  } catch (const std::bad_alloc&) {
    // The next look tries again.
  }
}

void Watchdog::look(Clock::time_point now, const std::function<bool()>& done, const std::function<bool(int)>& needed,
                    const std::function<bool(int)>& awaited) {
  const int size = static_cast<int>(peers_.ranks->size());
  if (seen_.empty()) {
    seen_.resize(static_cast<std::size_t>(size), Seen{0, begin_});
    for (int rank = 0; rank < size; ++rank)
      if (rank != self_ && awaited(rank)) seen_[static_cast<std::size_t>(rank)].progress = chain_of(rank).progress;
  }
  bool is_done = false;
  bool any_late = false;
  take_turn(next_late_, awaited, [&](int rank) {
    // A companion needs all ranks alive. The awaited rank is checked at once, without waiting for its turn.
    if (parent_ != nullptr) is_done = is_over(rank, done);
    if (!has_told_) tell(rank);
    any_late = is_late(rank, now) || any_late;
    return !is_done;
  });
  const auto is_needed = [&](int rank) { return parent_ != nullptr || needed(rank); };
  if (!is_done)
    take_turn(next_alive_, is_needed, [&](int rank) {
      is_done = is_over(rank, done);
      return !is_done;
    });
  if (is_done) return;
  if (any_late) {
    std::vector<int> late;
    for (int rank = 0; rank < size; ++rank) {
      if (rank == self_ || !awaited(rank) || !is_late(rank, now)) continue;
      const int end = chain_of(rank).end;
      if (std::ranges::find(late, end) == late.end()) late.push_back(end);
    }
    if (!late.empty() && !done()) time_out(std::move(late));
  }
  if (now - logged_ > std::chrono::seconds(30)) {
    logged_ = now;
    log_waiting(now, awaited);
    any_moves_ = false;
  }
}

void Watchdog::log_waiting(Clock::time_point now, const std::function<bool(int)>& awaited) const {
  std::string names;
  std::size_t count = 0;
  for (int rank = 0; rank < static_cast<int>(peers_.ranks->size()); ++rank)
    if (rank != self_ && awaited(rank) && ++count <= most_named)
      names += (count == 1 ? "" : "; ") + describe(rank, " is ");
  if (count > most_named) names += fmt::format(" and {} more", count - most_named);
  log(LogLevel::warning, fmt::format("rank {} has waited {:.0f} s in {}; {}{}", number(self_), seconds(now - begin_),
                                     in_quotes(options_.phase), names, any_moves_ ? "; progress is made" : ""));
}

}  // namespace muster::group

namespace muster {
namespace {

std::atomic<InterruptHook> interrupt_hook{nullptr};

}  // namespace

void set_interrupt_hook(InterruptHook hook) noexcept {
  interrupt_hook.store(hook, std::memory_order_release);
}

std::chrono::milliseconds group::default_timeout() {
  const auto text = os::environment("MUSTER_TIMEOUT");
  if (!text) return std::chrono::minutes(10);
  double seconds = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), seconds);
  if (error != std::errc{} || end != text->data() + text->size() || !std::isfinite(seconds) || seconds <= 0 ||
      seconds > std::chrono::duration<double>(longest_timeout).count())
    throw Error(ErrorKind::invalid_argument,
                fmt::format("MUSTER_TIMEOUT is {}: it must be a number of seconds", in_quotes(*text)));
  return std::chrono::milliseconds(std::max<std::int64_t>(1, std::llround(seconds * 1000)));
}

bool group::is_interrupted() noexcept {
  const InterruptHook hook = interrupt_hook.load(std::memory_order_acquire);
  return hook != nullptr && hook();
}

void group::check_interrupted(const char* phase) {
  if (is_interrupted()) throw Error(ErrorKind::cancelled, std::string(phase) + ": interrupted");
}

void group::sleep_unless_interrupted(std::chrono::milliseconds time, const char* phase) {
  using Clock = os::Clock;
  const Clock::time_point end = Clock::now() + time;
  do {
    check_interrupted(phase);
    std::this_thread::sleep_for(std::min<Clock::duration>(end - Clock::now(), between_questions));
  } while (Clock::now() < end);
}

}  // namespace muster
