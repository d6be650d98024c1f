// SPDX-License-Identifier: Apache-2.0
#include "src/sync/watchdog.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "muster/log.hpp"

namespace muster::sync {
namespace {

using Clock = std::chrono::steady_clock;

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
  std::vector<bool> seen(peers_.ranks.size());
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
  group_.poison(cause);
  // Another rank may have been first: all throw the same cause.
  throw group_.failure().value_or(cause);
}

std::string Watchdog::describe(int rank) const {
  const RankInfo& info = peers_.ranks[static_cast<std::size_t>(rank)];
  return fmt::format("rank {} (host {}, pid {}, {}, last seen in '{}')", rank, info.host, info.pid,
                     peers_.state_of(rank), group_.phase(rank));
}

void Watchdog::check_failure() {
  if (group_.has_failure()) throw *group_.failure();
  if (parent_ != nullptr && parent_->has_failure()) fail(*parent_->failure());
  if (options_.stop.stop_requested()) {
    const RankInfo& info = peers_.ranks[static_cast<std::size_t>(self_)];
    fail(Error(ErrorKind::cancelled,
               fmt::format("rank {} (host {}, pid {}) cancelled '{}'", self_, info.host, info.pid, options_.phase),
               {.rank = self_, .pid = info.pid, .host = info.host}));
  }
}

void Watchdog::time_out(const std::vector<int>& missing) {
  std::string names;
  for (const int rank : missing) names += (names.empty() ? "" : ", ") + describe(rank);
  const RankInfo& first = peers_.ranks[static_cast<std::size_t>(missing.front())];
  fail(Error(
      ErrorKind::timeout,
      fmt::format("rank {} waited {:.1f} s in '{}' without progress for {}: look what that process does, or raise the "
                  "timeout (MUSTER_TIMEOUT, seconds)",
                  self_, seconds(Clock::now() - begin_), options_.phase, names),
      {.rank = missing.front(), .pid = first.pid, .host = first.host}));
}

void Watchdog::check(const std::function<bool()>& done, const std::function<bool(int)>& needed,
                     const std::function<bool(int)>& awaited) {
  check_failure();
  const Clock::time_point now = Clock::now();
  const int size = static_cast<int>(peers_.ranks.size());
  if (seen_.empty()) seen_.resize(static_cast<std::size_t>(size), Seen{0, begin_});
  std::vector<int> late;
  bool any_moves = false;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == self_ || (parent_ == nullptr && !needed(rank))) continue;
    const bool left = group_.has_left(rank);
    const std::optional<std::string> end = left ? "left the group" : peers_.end_of(rank);
    if (end) {
      if (done()) return;
      check_failure();
      const RankInfo& info = peers_.ranks[static_cast<std::size_t>(rank)];
      fail(Error(ErrorKind::peer_lost,
                 fmt::format("rank {} (host {}, pid {}) {} while rank {} was in '{}'; it was last seen in '{}'", rank,
                             info.host, info.pid, *end, self_, options_.phase, group_.phase(rank)),
                 {.rank = rank, .pid = info.pid, .host = info.host}));
    }
    if (!awaited(rank)) continue;
    if (!has_told_) tell(rank);
    Seen& seen = seen_[static_cast<std::size_t>(rank)];
    const Chain chain = chain_of(rank);
    if (chain.progress != seen.progress) {
      seen = {chain.progress, now};
      any_moves = true;
    }
    if (now - seen.since > timeout_ && std::ranges::find(late, chain.end) == late.end()) late.push_back(chain.end);
  }
  if (!late.empty() && !done()) time_out(late);
  if (now - logged_ > std::chrono::seconds(30)) {
    logged_ = now;
    std::string names;
    for (int rank = 0; rank < size; ++rank)
      if (rank != self_ && awaited(rank)) names += (names.empty() ? "" : ", ") + describe(rank);
    log(LogLevel::warning, fmt::format("rank {} has waited {:.0f} s in '{}' for {}{}", self_, seconds(now - begin_),
                                       options_.phase, names, any_moves ? ": it moves" : ""));
  }
}

}  // namespace muster::sync
