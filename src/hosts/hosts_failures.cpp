// SPDX-License-Identifier: Apache-2.0
// How an HostsGroup fails: which words all ranks throw, and how the other hosts hear of them. The numbers are those of
// Health in hosts_group.hpp.

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include <fmt/core.h>

#include "src/hosts/hosts_group.hpp"
#include "src/sync/local_group.hpp"

namespace muster::hosts {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::chrono::microseconds settle_nap{200};
constexpr milliseconds longest_unpumped{1};

}  // namespace

void Health::propose(int host, const Error& cause) {
  const std::lock_guard lock(mutex_);
  if (!since_) since_ = Clock::now();
  proposals_.emplace(host, cause);
}

std::optional<Health::Clock::time_point> Health::since() const {
  const std::lock_guard lock(mutex_);
  return since_;
}

void Health::decide(const Error& cause) {
  const std::lock_guard lock(mutex_);
  if (!since_) since_ = Clock::now();
  if (!decided_) decided_ = cause;
}

std::optional<Error> Health::decided() const {
  const std::lock_guard lock(mutex_);
  return decided_;
}

std::optional<Error> Health::known_failure() const {
  {
    const std::lock_guard lock(mutex_);
    if (decided_) return decided_;
    if (!proposals_.empty()) return proposals_.begin()->second;
  }
  if (const auto host = local_.lock())
    if (auto cause = host->failure()) return cause;
  return parent ? parent->known_failure() : std::nullopt;
}

void HostsGroup::tell_other_hosts(const Error& cause) noexcept {
  context_->has_failed();
  if (!has_other_hosts()) return;
  try {
    const Control notice = failure_notice(context_->rank(), number_, cause, ended_round_.load());
    for (const int rank : hosts_.told_by(this->rank())) context_->tell(number_of(rank), notice);
    // This process may end soon. Whoever does not listen, such as the one that is blamed, keeps the others no longer
    // than settling does.
    context_->flush(Health::settling);
  } catch (const std::exception&) {
    // They find out by their own deadlines.
  }
}

HostsGroup::InRound::InRound(HostsGroup& group) noexcept : group_(group) {
  group_.in_round_.store(group_.round_);
}

HostsGroup::InRound::~InRound() {
  const auto hold = group_.context_->lock();
  group_.in_round_.store(0);
  if (std::uncaught_exceptions() == uncaught_) group_.ended_round_.store(group_.round_);
  group_.hear_later_failures();
}

void HostsGroup::hear_later_failures() {
  const auto hold = context_->lock();
  for (const Control& failure : std::exchange(later_failures_, {}))
    hear(host_of(rank_of(failure.from)), failure.error.get());
}

void HostsGroup::hear(int host, const Error& cause) {
  if (settles()) {
    health_->propose(host, cause);
    return;
  }
  health_->decide(cause);
  local().poison(cause);
}

// Step 1.
void HostsGroup::pass_on_local_failure() noexcept {
  const std::optional<Error> cause = local().failure();
  if (!cause || has_passed_on_.exchange(true)) return;
  if (settles()) {
    // Step 4 has put it there, or it was decided before this rank came to know.
    if (health_->decided() || verdict()) return;
    health_->propose(hosts_.mine, *cause);
    tell_other_hosts(*cause);
    return;
  }
  health_->decide(*cause);
  // What began on another host is known there.
  const int blamed = rank_of(cause->rank().value_or(-1));
  if (blamed < 0 || hosts_.is_here(blamed)) tell_other_hosts(*cause);
}

Error HostsGroup::origin_of(const Error& cause) const {
  const int lost = rank_of(cause.rank().value_or(-1));
  if (cause.kind() != ErrorKind::peer_lost || lost < 0 || hosts_.is_here(lost)) return cause;
  for (const int mate : hosts_.here()) {
    if (mate == rank() || !liveness(mate)->is_dead()) continue;
    return error_of(
        info(mate), ErrorKind::peer_lost,
        fmt::format("{} died; rank {} noticed it by this: {}", name_of(info(mate)), number_of(rank()), cause.what()));
  }
  return cause;
}

void HostsGroup::poison(const Error& news) noexcept {
  if (settles()) context_->try_pump();
  if (!known_failure()) {
    const Error cause = origin_of(news);
    local().poison(cause);
    if (!settles()) {
      // Also what this rank alone knows: its causes need not be of its host.
      const Error first = local().failure().value_or(cause);
      health_->decide(first);
      if (!has_passed_on_.exchange(true)) tell_other_hosts(first);
      return;
    }
  }
  pass_on_local_failure();
  if (settles()) settle();
}

bool HostsGroup::settles() const noexcept {
  return has_other_hosts() && !is_companion() && !has_ended_.load();
}

std::optional<Error> HostsGroup::verdict() const {
  return shared() == nullptr ? std::nullopt : shared()->verdict();
}

std::optional<Error> HostsGroup::failure() const {
  auto known = known_failure();
  if (!known && has_other_hosts() && context_->since_pumped() > longest_unpumped) {
    // Who only asks has to hear of other hosts, too.
    context_->try_pump();
    known = known_failure();
  }
  // Settling listens and tells, but changes nothing that a caller could see but the failure itself.
  if (known && settles())
    known = const_cast<HostsGroup*>(this)->settle();  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  if (known && !is_companion() && transport().must_rest())
    return known->with_context(
        fmt::format("tensors were being sent, and {} may still read them: leave them where they are until the process "
                    "ends",
                    transport().name()));
  return known;
}

bool HostsGroup::is_settled() const {
  const auto since = health_->since();
  if (!since) return false;
  const bool decides = rank() == hosts_.leader(hosts_.mine) || hosts_.told_of(hosts_.mine) == hosts_.here().size();
  return Clock::now() - *since > Health::settling + (decides ? milliseconds(0) : Health::lead);
}

Error HostsGroup::settle() noexcept {
  if (const auto decided = health_->decided()) return *decided;
  pass_on_local_failure();
  // The round of this rank has failed, too.
  hear_later_failures();
  // Step 2.
  while (!verdict() && !is_settled()) {
    // A mate has put it there, and may be telling it.
    if (const auto own = local().failure(); own && !verdict()) health_->propose(hosts_.mine, *own);
    context_->try_pump();
    std::this_thread::sleep_for(settle_nap);
  }
  return decide();
}

// Steps 3 and 4.
Error HostsGroup::decide() noexcept {
  context_->has_failed();
  const Error best = known_failure().value_or(Error(ErrorKind::peer_lost, "the group has failed"));
  const Error cause = shared() == nullptr ? best : shared()->decide(best);
  health_->decide(cause);
  local().poison(cause);
  return *health_->decided();
}

}  // namespace muster::hosts
