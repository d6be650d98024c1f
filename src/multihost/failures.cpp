// SPDX-License-Identifier: Apache-2.0
// How all ranks of a HostsGroup come to throw the same cause. The step numbers are those of Health in group.hpp.

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include <fmt/core.h>

#include "src/group/local_group.hpp"
#include "src/multihost/group.hpp"
#include "src/os/clock.hpp"

namespace muster::multihost {
namespace {

using Clock = os::Clock;
using std::chrono::milliseconds;

constexpr milliseconds longest_unpumped{1};
// A rank sends for its host after the ranks before it had this much time each to do so.
constexpr milliseconds turn_of_a_rank{100};
constexpr int most_turns = 8;
// The interval at which a host repeats its notice while it waits for a decision.
constexpr milliseconds between_notices{200};
// The number of hosts that must confirm the decision before all others receive it. Each of them may be stopped.
constexpr int most_behind = 2;
// After this time a rank without a decision throws the first cause that it knows.
constexpr std::chrono::seconds longest_agreement{5};
// The same limit for a thread that must not call the transport.
constexpr milliseconds longest_silence{300};

}  // namespace

void FailureConsensus::decide(const Error& cause) {
  const std::lock_guard lock(mutex_);
  if (!decided_) decided_ = cause;
}

std::optional<Error> FailureConsensus::decided() const {
  const std::lock_guard lock(mutex_);
  return decided_;
}

std::optional<Error> FailureConsensus::known_failure() const {
  if (auto cause = decided()) return cause;
  if (const auto host = local_.lock())
    if (auto cause = host->error()) return cause;
  return parent ? parent->known_failure() : std::nullopt;
}

bool HostsGroup::needs_decision() const noexcept {
  return has_other_hosts() && !is_companion() && !has_ended_.load();
}

std::optional<Error> HostsGroup::decision() const {
  return shared() == nullptr ? own_decision_ : shared()->decision();
}

Error HostsGroup::decide(const Error& cause) {
  if (shared() != nullptr)
    shared()->decide(cause);
  else if (!own_decision_)
    own_decision_ = cause;
  return decision().value_or(cause);
}

Control HostsGroup::about_failure(ControlKind kind, const Error& cause) const {
  Control control{.kind = kind, .from = context_->rank(), .group = number_, .round = ended_round_.load()};
  control.error.put(cause);
  return control;
}

const std::shared_ptr<const Contacts>& HostsGroup::contacts() {
  if (contacts_) return contacts_;
  const auto made = std::make_shared<Contacts>();
  made->mine = hosts_->mine;
  for (const std::vector<int>& host : hosts_->members) {
    std::vector<int>& numbers = made->of_hosts.emplace_back();
    for (const int rank : host) numbers.push_back(number_of(rank));
  }
  return contacts_ = made;
}

void HostsGroup::take_failure(const Control& control) {
  if (control.kind == ControlKind::decision) {
    decide(control.error.get());
    passed_by_ = host_of(rank_of(control.from));
  }
  // If this round has succeeded for the sender, its last message will arrive here too, unless this rank fails by
  // itself.
  const std::uint32_t mine = round_.load();
  if (mine == ended_round_.load() || control.round < mine || knows_failure_)
    return learn(control.error.get(), host_of(rank_of(control.from)));
  if (!later_since_) later_since_ = Clock::now();
  later_failures_.push_back(control);
}

void HostsGroup::learn_later_failures() {
  later_since_.reset();
  for (const Control& control : std::exchange(later_failures_, {}))
    learn(control.error.get(), host_of(rank_of(control.from)));
}

void HostsGroup::end_round() {
  ended_round_.store(round_.load());
  const auto hold = context_->lock();
  learn_later_failures();
}

void HostsGroup::learn(const Error& cause, int host) {
  const auto hold = context_->lock();
  context_->has_failed();
  const bool is_new = !knows_failure_;
  if (is_new) knows_failure_.emplace();
  // Step 1.
  local().abort(cause);
  has_message_ = has_message_ || host >= 0;
  if (needs_decision()) return advance_failure();
  const Error first = local().error().value_or(cause);
  health_->decide(first);
  if (is_new && has_other_hosts() && !has_ended_.load())
    spread_ = context_->deliveries().spread(contacts(), about_failure(ControlKind::notice, first), {host});
}

bool HostsGroup::sends_for_host() const {
  if (shared() == nullptr || has_message_) return true;
  int before = 0;
  for (int place = 0; place < place_of(rank()); ++place)
    if (!shared()->is_gone(place)) ++before;
  return before < most_turns && knows_failure_->sum() >= before * turn_of_a_rank;
}

bool HostsGroup::is_passed_on() const {
  return shared() == nullptr ? is_passed_on_ : shared()->is_passed_on();
}

void HostsGroup::advance_failure() {
  if (!knows_failure_ || is_passed_on()) return;
  knows_failure_->turn();
  if (!sends_for_host()) return;
  if (!decision() || (decides_ && !is_settled_)) advance_notice();
  const std::optional<Error> cause = decision();
  if (!cause || (decides_ && !is_settled_)) return;
  // Step 4.
  if (!spread_) {
    // The host behind this one has confirmed the decision in step 3.
    const bool has_behind = decides_ && delivery_ && delivery_->state == Delivery::State::confirmed;
    spread_ = context_->deliveries().spread(contacts(), about_failure(ControlKind::decision, *cause),
                                            {passed_by_, has_behind ? behind_ : -1});
  }
  if (spread_->open != 0) return;
  is_passed_on_ = true;
  if (shared() != nullptr) shared()->set_passed_on();
}

void HostsGroup::advance_notice() {
  const Error first = local().error().value_or(Error(ErrorKind::peer_lost, "the group has failed"));
  const auto send = [&](int host, ControlKind kind, const Error& cause) {
    sent_ = Clock::now();
    delivery_ =
        context_->deliveries().begin(contacts()->of_hosts[static_cast<std::size_t>(host)], about_failure(kind, cause));
  };
  if (above_.empty() && !decides_) {
    const HostTree tree = host_tree();
    for (int host = hosts_->mine; host != 0; host = tree.parent(host)) above_.push_back(tree.parent(host));
    for (int host = 1; host < hosts_->mine; ++host)
      if (std::ranges::find(above_, host) == above_.end()) above_.push_back(host);
  }
  // Step 2.
  while (!decides_ && !above_.empty()) {
    if (!delivery_) send(above_.front(), ControlKind::notice, first);
    if (delivery_->decision) {
      decide(*delivery_->decision);
      return;
    }
    if (delivery_->state == Delivery::State::confirmed && Clock::now() - sent_ > between_notices)
      send(above_.front(), ControlKind::notice, first);
    if (delivery_->state != Delivery::State::failed) return;
    above_.erase(above_.begin());
    delivery_ = nullptr;
  }
  // Step 3.
  if (!std::exchange(decides_, true)) {
    behind_ = hosts_->mine;
    if (hosts_->mine != 0) decide(first);
  }
  while (!delivery_ || delivery_->state == Delivery::State::failed) {
    const int hosts = static_cast<int>(hosts_->members.size());
    if (++behind_ == std::min(hosts, hosts_->mine + 1 + most_behind)) {
      decide(first);
      is_settled_ = true;
      return;
    }
    send(behind_, ControlKind::decision, decision().value_or(first));
  }
  if (delivery_->state != Delivery::State::confirmed) return;
  decide(delivery_->decision.value_or(first));
  is_settled_ = true;
}

Error HostsGroup::await_decision() noexcept {
  if (const auto decided = health_->decided()) return *decided;
  RunningTime waited;
  for (;;) {
    try {
      const auto hold = context_->lock();
      context_->has_failed();
      if (!knows_failure_) knows_failure_.emplace();
      // The round of this rank has failed too.
      learn_later_failures();
      advance_failure();
      if (decision() && is_passed_on()) break;
    } catch (const std::exception&) {
      // The process is out of memory, which may be temporary.
    }
    context_->try_pump();
    waited.turn();
    if (waited.sum() > (context_->may_call() ? milliseconds(longest_agreement) : longest_silence)) break;
    std::this_thread::sleep_for(
        std::clamp<Clock::duration>(waited.sum() / 16, std::chrono::microseconds(100), milliseconds(10)));
  }
  const auto hold = context_->lock();
  const Error cause = decide(known_failure().value_or(Error(ErrorKind::peer_lost, "the group has failed")));
  health_->decide(cause);
  return cause;
}

Error HostsGroup::origin_of(const Error& cause) const {
  const int lost = rank_of(cause.rank().value_or(-1));
  if (cause.kind() != ErrorKind::peer_lost || lost < 0 || hosts_->is_here(lost)) return cause;
  for (const int mate : hosts_->here()) {
    if (mate == rank() || !liveness(mate)->is_dead()) continue;
    return error_of(
        info(mate), ErrorKind::peer_lost,
        fmt::format("{} died; rank {} noticed this error: {}", name_of(info(mate)), number_of(rank()), cause.what()));
  }
  return cause;
}

void HostsGroup::do_abort(const Error& news) noexcept {
  try {
    if (needs_decision()) context_->try_pump();
    if (!known_failure()) learn(origin_of(news), -1);
  } catch (const std::exception&) {
    local().abort(news);
  }
  (void)error();
}

std::optional<Error> HostsGroup::do_failure() const {
  auto known = known_failure();
  if (!known && has_other_hosts() && context_->since_pumped() > longest_unpumped) {
    // A rank that only queries the failure must also learn of failures on other hosts.
    context_->try_pump();
    known = known_failure();
  }
  if (!known) return known;
  // The failure itself is the only state that a caller can see change.
  auto& self = const_cast<HostsGroup&>(*this);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  if (needs_decision()) {
    known = self.await_decision();
  } else if (!health_->decided() && !has_ended_.load() && local().error()) {
    // The ranks of another host have received a failure that began there.
    const int blamed = rank_of(known->rank().value_or(-1));
    if (blamed < 0 || hosts_->is_here(blamed))
      self.learn(*known, -1);
    else
      health_->decide(*known);
  }
  if (!is_companion() && transport().must_rest())
    return known->with_context(
        fmt::format("tensors were being sent, and {} may still read them. Keep them unchanged until the process ends",
                    transport().name()));
  return known;
}

}  // namespace muster::multihost
