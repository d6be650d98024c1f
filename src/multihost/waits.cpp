// SPDX-License-Identifier: Apache-2.0
// How a HostsGroup waits and how it ends.

#include "src/base/escaped.hpp"
#include "src/multihost/group.hpp"
#include "src/os/clock.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <thread>

#include "src/base/fixed_string.hpp"
#include "src/group/local_group.hpp"
#include "src/group/progress.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"

namespace muster::multihost {
namespace {

using Clock = os::Clock;
using group::Watchdog;
using std::chrono::milliseconds;

// Long enough for an answer over a network. Short compared with the time slice of the scheduler, which matters if there
// are more ranks than cores.
constexpr std::chrono::microseconds spinning{200};
// A nap is a small fraction of the wait so far. So a long wait uses almost no CPU time, and reacts only a little later.
constexpr std::chrono::microseconds shortest_nap{100};
constexpr int naps_a_wait = 64;
constexpr milliseconds between_two_questions{1000};
constexpr milliseconds first_question{250};
/// The ranks of a longer list are asked later.
constexpr std::size_t most_asked_soon = 32;
// A rank that has left may have sent the awaited message before.
constexpr milliseconds last_messages{200};
// The longest time that the last message of a round may take.
constexpr milliseconds end_of_round{300};

}  // namespace

HostsGroup::~HostsGroup() {
  if (!is_owner_process()) return;
  end_progress();
  context_->take_over();
  tell_leaving();
  context_->remove_group(number_);
  advance_endings(kind());
}

void HostsGroup::tell_leaving() noexcept {
  if (!has_other_hosts() || known_failure() || has_ended_.load()) return;
  try {
    // A round ends for all ranks together, because the leaders wait for each other. Ranks that receive no notice get
    // the information when they ask.
    if (rank() != hosts_->leader(hosts_->mine)) return;
    const Control notice{.kind = ControlKind::left, .from = context_->rank(), .group = number_};
    const HostTree tree = host_tree();
    for (const int child : tree.children(hosts_->mine)) context_->tell(number_of(hosts_->leader(child)), notice);
    if (hosts_->mine != 0) context_->tell(number_of(hosts_->leader(tree.parent(hosts_->mine))), notice);
  } catch (const std::exception&) {
    // The other ranks notice it at their own deadlines.
  }
}

void HostsGroup::end() noexcept {
  tell_leaving();
  // This must not wait: the thread that uses the group may wait for the lock of the context.
  if (const Hold hold(*this, Hold::Kind::progress); hold) packets_.clear();
  has_ended_.store(true);
  health_->decide(transport().ended());
}

const HostsGroup::RemoteRankState& HostsGroup::view_of(int rank) const {
  static const RemoteRankState unknown;
  const auto found = views_.find(rank);
  return found == views_.end() ? unknown : found->second;
}

void HostsGroup::take(const Control& control) {
  if (control.kind == ControlKind::died) {
    if (const int dead = rank_of(control.about); dead >= 0) views_[dead].is_dead = true;
    return;
  }
  const int from = rank_of(control.from);
  if (from < 0) return;
  RemoteRankState& view = views_[from];
  view.heard = Clock::now();
  switch (control.kind) {
    case ControlKind::notice:
    case ControlKind::decision:
      take_failure(control);
      break;
    case ControlKind::left:
      view.has_left = true;
      view.phase = "leaving";
      break;
    case ControlKind::ask: {
      const int on = awaited();
      Control answer{.kind = ControlKind::answer,
                     .from = context_->rank(),
                     .group = number_,
                     .waits_for = on < 0 ? -1 : number_of(on)};
      answer.progress = health_->progress.load(std::memory_order_relaxed);
      // For a companion, the progress of the rank in its parent group counts too.
      if (is_companion()) answer.progress += health_->parent->progress.load(std::memory_order_relaxed);
      put_text(answer.phase, phase_.load());
      context_->tell(control.from, answer);
      break;
    }
    case ControlKind::answer:
      view.is_asked = false;
      if (control.has_left != 0) {
        view.has_left = true;
        view.phase = "leaving";
        break;
      }
      view.progress = control.progress;
      view.waits_for = rank_of(control.waits_for);
      view.phase = get_text(control.phase);
      break;
    case ControlKind::died:
    case ControlKind::disconnect:
    case ControlKind::confirm:
      break;
  }
}

void HostsGroup::progress() noexcept {
  health_->progress.fetch_add(1, std::memory_order_relaxed);
  if (is_companion()) health_->parent->progress.fetch_add(1, std::memory_order_relaxed);
  local().progress();
  // Ranks that ask need an answer even from a rank that works for a long time inside one call.
  const milliseconds often = context_->is_under_way() ? milliseconds(1) : milliseconds(200);
  if ((!has_other_hosts() && !context_->is_under_way()) || context_->since_pumped() < often) return;
  context_->try_pump();
}

WaitOptions HostsGroup::later(const WaitOptions& options, milliseconds grace) const {
  WaitOptions longer = options;
  longer.timeout = group::timeout_of(options, *this) + grace;
  return longer;
}

int HostsGroup::awaited() const {
  if (const int on = waits_for_.load(); on >= 0) return on;
  const std::optional<int> place = shared() == nullptr ? std::nullopt : shared()->missing();
  if (!place) return -1;
  return hosts_->here()[static_cast<std::size_t>(*place)];
}

/// The ranks of the group, as their messages show them.
class HostsGroup::Others final : public group::Peers {
 public:
  explicit Others(const HostsGroup& group) : group_(group) { ranks = group.ranks(); }
  [[nodiscard]] std::optional<std::string> end_of(int rank) const override {
    const auto hold = group_.context_->lock();
    const RemoteRankState& view = group_.view_of(rank);
    return view.is_dead && !view.has_left ? std::optional<std::string>("died") : std::nullopt;
  }
  [[nodiscard]] std::string state_of(int rank) const override {
    if (group_.hosts_->is_here(rank)) {
      const bool is_stopped = os::process_state(group_.info(rank).pid) == os::ProcessState::stopped;
      return is_stopped ? "stopped" : "on this host";
    }
    const auto hold = group_.context_->lock();
    const auto answers = [this](int other) {
      const RemoteRankState& view = group_.view_of(other);
      return view.heard != Clock::time_point{} && Clock::now() - view.heard < 3 * between_two_questions;
    };
    if (answers(rank)) return "alive";
    const std::vector<int>& mates = group_.hosts_->on(group_.host_of(rank));
    if (mates.size() == 1 || std::ranges::any_of(mates, answers)) return "not answering";
    return fmt::format(
        "not answering, and neither {} of that host",
        mates.size() == 2 ? "is the other rank" : fmt::format("are the {} other ranks", mates.size() - 1));
  }

 private:
  const HostsGroup& group_;
};

std::unique_ptr<const group::Peers> HostsGroup::others() const {
  return std::make_unique<const Others>(*this);
}

/// The liveness of the other ranks during one wait. A rank is asked when its progress is queried. A question may need a
/// new connection. So ranks that only an awaited rank waits for, and ranks of a long list, are asked after half of the
/// timeout: on a busy machine the chains of waiting ranks lead to every rank.
class HostsGroup::OthersPulse final : public group::Pulse {
 public:
  OthersPulse(HostsGroup& group, std::span<const int> asked_soon, milliseconds timeout)
      : group_(group),
        asked_soon_(asked_soon),
        // Several times before the deadline, even if it is short: a rank that is not asked cannot report progress.
        every_(std::min(between_two_questions, timeout / 5)),
        others_after_(timeout / 2) {}

  [[nodiscard]] bool has_left(int rank) const override {
    const auto hold = group_.context_->lock();
    return view(rank).has_left && Clock::now() - view(rank).heard > last_messages;
  }
  [[nodiscard]] std::uint64_t progress_of(int rank) const override {
    if (rank == group_.rank()) return 0;
    const auto hold = group_.context_->lock();
    const Clock::time_point now = Clock::now();
    RemoteRankState& asked = group_.views_[rank];
    // Ranks of this host are asked too: their progress in shared memory also changes while they wait for other ranks.
    const milliseconds soon = std::min(every_, first_question);
    if (asked.is_dead || now - begin_ < (asked_soon_.contains(rank) ? soon : std::max(soon, others_after_)))
      return asked.progress;
    if (!asked.is_asked && now - asked.asked > every_) {
      asked.asked = now;
      asked.is_asked = true;
      group::or_fail(group_, [&] {
        group_.context_->tell(group_.number_of(rank),
                              {.kind = ControlKind::ask, .from = group_.context_->rank(), .group = group_.number_});
      });
    } else if (asked.is_asked && now - asked.asked > soon && now - asked.asked_about > every_) {
      // The rank has not received the question yet, so a second question is useless.
      asked.asked_about = now;
      group_.context_->ask_about(group_.number_of(rank));
    }
    return asked.progress;
  }
  [[nodiscard]] std::uint32_t awaited_by(int rank) const override {
    // A chain that returns to this rank ends like a cycle.
    if (rank == group_.rank()) return static_cast<std::uint32_t>(rank) + 1;
    const auto hold = group_.context_->lock();
    return static_cast<std::uint32_t>(view(rank).waits_for + 1);
  }
  void tell_awaited(int, std::uint32_t) noexcept override {}
  [[nodiscard]] std::string phase(int rank) const override {
    const auto hold = group_.context_->lock();
    return view(rank).phase;
  }
  void abort(const Error& cause) noexcept override { group_.abort(cause); }
  [[nodiscard]] std::optional<Error> error() const override { return group_.error(); }
  [[nodiscard]] bool has_failure() const noexcept override { return group_.known_failure().has_value(); }

 private:
  [[nodiscard]] const RemoteRankState& view(int rank) const { return group_.view_of(rank); }

  HostsGroup& group_;
  const group::RankSet asked_soon_;
  milliseconds every_;  // the interval between two questions to one rank
  milliseconds others_after_;
  Clock::time_point begin_ = Clock::now();
};

void HostsGroup::wait(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                      std::span<const int> on, const WaitOptions& options, milliseconds grace, bool may_have_left,
                      Asking asking) {
  const milliseconds timeout = group::timeout_of(options, *this) + grace;
  const Awaiting awaiting(*this, on.empty() ? -1 : on.front(), options.phase);
  const group::RankSet wanted(on);
  const bool asks_soon = asking == Asking::soon && on.size() <= most_asked_soon && !forwarding_;
  OthersPulse pulse(*this, on.first(asks_soon ? on.size() : 0), timeout);
  Watchdog watchdog(pulse, nullptr, *others_, rank(), options, timeout);
  const std::function<bool(int)> is_awaited = [&](int rank) { return wanted.contains(rank); };
  const std::function<bool(int)> is_needed = [&](int rank) {
    const auto hold = context_->lock();
    if (view_of(rank).has_left) return is_awaited(rank) && !may_have_left;
    return is_awaited(rank) || is_companion();
  };
  Clock::time_point moved = Clock::now();
  Clock::time_point looked = moved;
  std::uint64_t progress = health_->progress.load(std::memory_order_relaxed);
  look_around();
  group::RankProgress progress_of_all;
  while (!done()) {
    group::or_fail(*this, [&] {
      transport().throw_if_resting();
      context_->pump();
    });
    watchdog.check(done, is_needed, is_awaited);
    const Clock::time_point now = Clock::now();
    if (const std::uint64_t so_far = health_->progress.load(std::memory_order_relaxed); so_far != progress) {
      progress = so_far;
      moved = now;
    }
    const std::chrono::nanoseconds longest = progress_of_all.step(Watchdog::slice);
    if (sleep)
      sleep(longest);
    else if (now - moved < spinning)
      std::this_thread::yield();
    else if (context_->has_just_failed())
      std::this_thread::sleep_for(shortest_nap);
    else
      std::this_thread::sleep_for(
          std::min(longest, std::max<std::chrono::nanoseconds>((now - moved) / naps_a_wait, shortest_nap)));
    if (now - looked < Watchdog::slice) continue;
    looked = now;
    look_around();
    if (context_->may_call()) advance_endings(kind());
    // Ranks of this host that wait for this rank also wait for the rank for which it waits. This rank's own deadline
    // determines the rank to blame.
    local().progress();
  }
}

void HostsGroup::throw_if_dead(int other) const {
  if (!shares_memory(other) || !liveness(other)->is_dead()) return;
  throw error_of(info(other), ErrorKind::peer_lost,
                 fmt::format("{} died while tensors were in flight between it and rank {}", name_of(info(other)),
                             number_of(rank())));
}

void HostsGroup::throw_lost(int other, const char* phase, const Error& error) const {
  if (error.rank() || (error.kind() != ErrorKind::io && !os::is_own_shortage(error.os_error()))) throw Error(error);
  // A shortage of resources in this process is not a failure of the other rank.
  if (os::is_own_shortage(error.os_error()))
    throw group::in_own_name(
        *this, error.with_context(fmt::format("{}: exchange with rank {}", in_quotes(phase), number_of(other))));
  throw error_of(
      info(other), ErrorKind::peer_lost,
      fmt::format("{}: rank {} with {}: {}", in_quotes(phase), number_of(rank()), name_of(info(other)), error.what()));
}

void HostsGroup::look_around() {
  context_->try_pump();
  const auto hold = context_->lock();
  // A rank that is now dead may have sent the cause that all ranks throw.
  if (!known_failure()) context_->look_for_the_dead();
  if (later_since_ && Clock::now() - *later_since_ > end_of_round) learn_later_failures();
  advance_failure();
}

void HostsGroup::do_wait_until(const std::function<bool()>& done,
                               const std::function<void(std::chrono::nanoseconds)>& sleep, std::span<const int> on,
                               const WaitOptions& options) {
  // A local group of one rank knows neither its number in this group nor the messages of other hosts.
  if ((has_other_hosts() && is_alone_here()) ||
      !std::ranges::all_of(on, [&](int rank) { return hosts_->is_here(rank); })) {
    wait(done, sleep, on, options, milliseconds(0));
    return;
  }
  // The local group may not know yet about a failure that began on another host.
  if (!done() && known_failure()) throw *error();
  std::vector<int> places;
  for (const int rank : on) places.push_back(place_of(rank));
  locally(on.empty() ? -1 : on.front(), [&] { local().wait_until(done, sleep, places, later(options)); });
}

}  // namespace muster::multihost
