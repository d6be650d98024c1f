// SPDX-License-Identifier: Apache-2.0
// How an MpiGroup waits and how it ends.

#include "src/mpi/mpi_group.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <thread>

#include "muster/log.hpp"
#include "src/base/fixed_text.hpp"
#include "src/sync/local_group.hpp"
#include "src/sync/settings.hpp"

namespace muster::mpi {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Long enough for an answer of a network, short against the scheduler's slice where ranks are more than cores.
constexpr std::chrono::microseconds spinning{200};
constexpr std::chrono::microseconds nap{100};
constexpr milliseconds slice{20};
constexpr milliseconds asking{1000};
// A rank that has left may have sent before what is waited for.
constexpr milliseconds last_messages{200};

double seconds(Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

MpiGroup::~MpiGroup() {
  if (!is_owner_process()) return;
  family_->take_over();
  pass_on_local_failure();
  tell_leaving();
  family_->resign(number_);
  advance_endings();
}

void MpiGroup::tell_leaving() noexcept {
  if (!has_other_hosts() || known_failure() || has_ended_.load()) return;
  try {
    // Rounds end at once for all: hosts wait for each other by their leaders. Others hear it when they ask.
    if (rank() != hosts_.leader(hosts_.mine)) return;
    const Control notice{.kind = ControlKind::left, .from = family_->rank(), .group = number_};
    const HostTree tree = host_tree();
    for (const int child : tree.children(hosts_.mine)) family_->tell(number_of(hosts_.leader(child)), notice);
    if (hosts_.mine != 0) family_->tell(number_of(hosts_.leader(tree.parent(hosts_.mine))), notice);
  } catch (const std::exception&) {
    // They find out by their own deadlines.
  }
}

void MpiGroup::end() noexcept {
  tell_leaving();
  const Error ended(ErrorKind::argument,
                    "MPI has ended in this process (MPI_Finalize): its groups cannot be used any more",
                    {.rank = family_->rank()});
  has_ended_.store(true);
  standing_->first_cause.decide(ended);
}

void MpiGroup::take(const Control& control) {
  if (control.kind == ControlKind::died) {
    if (const int dead = rank_of(control.about); dead >= 0) views_[static_cast<std::size_t>(dead)].is_dead = true;
    return;
  }
  const int from = rank_of(control.from);
  if (from < 0) return;
  View& view = views_[static_cast<std::size_t>(from)];
  view.heard = Clock::now();
  switch (control.kind) {
    case ControlKind::failure:
      hear(host_of(from), to_error(control));
      break;
    case ControlKind::left:
      view.has_left = true;
      view.phase = "leaving";
      break;
    case ControlKind::ask: {
      const int on = awaited();
      Control answer{.kind = ControlKind::answer,
                     .from = family_->rank(),
                     .group = number_,
                     .waits_for = on < 0 ? -1 : number_of(on)};
      answer.progress = standing_->progress.load(std::memory_order_relaxed);
      // Of a companion: what the rank does with the other group counts, too.
      if (is_companion()) answer.progress += standing_->parent->progress.load(std::memory_order_relaxed);
      put_text(answer.phase, phase_.load());
      family_->tell(control.from, answer);
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
    case ControlKind::farewell:
      break;
  }
}

void MpiGroup::progress() noexcept {
  standing_->progress.fetch_add(1, std::memory_order_relaxed);
  if (is_companion()) standing_->parent->progress.fetch_add(1, std::memory_order_relaxed);
  local().progress();
  // Who asks must hear from a rank that works for long inside one call.
  const milliseconds often = family_->is_under_way() ? milliseconds(1) : milliseconds(200);
  if ((!has_other_hosts() && !family_->is_under_way()) || family_->since_pumped() < often) return;
  family_->try_pump();
}

WaitOptions MpiGroup::later(const WaitOptions& options, milliseconds grace) const {
  WaitOptions longer = options;
  longer.timeout = sync::timeout_of(options.timeout, timeout()) + grace;
  return longer;
}

std::string MpiGroup::describe(int rank) {
  const RankInfo& peer = info(rank);
  const auto hold = family_->lock();
  const Clock::time_point now = Clock::now();
  const auto answers = [&](int other) {
    const View& view = views_[static_cast<std::size_t>(other)];
    return view.heard != Clock::time_point{} && now - view.heard < 3 * asking;
  };
  const View& view = views_[static_cast<std::size_t>(rank)];
  std::string words = fmt::format("rank {} (host {}, pid {}, {}{})", peer.rank, peer.host, peer.pid,
                                  view.has_left          ? "left the group"
                                  : hosts_.is_here(rank) ? "on this host"
                                  : answers(rank)        ? "alive"
                                                         : "does not answer",
                                  view.phase.empty() ? std::string() : fmt::format(", last seen in '{}'", view.phase));
  const std::vector<int>& mates = hosts_.on(hosts_.host_of[static_cast<std::size_t>(rank)]);
  if (mates.size() > 1 && !hosts_.is_here(rank) && std::ranges::none_of(mates, answers))
    words += fmt::format(" and the {} other rank{} of that host", mates.size() - 1, mates.size() == 2 ? "" : "s");
  return words;
}

int MpiGroup::awaited() const {
  if (const int on = waits_for_.load(); on >= 0) return on;
  const std::optional<int> place = shared() == nullptr ? std::nullopt : shared()->missing();
  if (!place) return -1;
  return hosts_.here()[static_cast<std::size_t>(*place)];
}

MpiGroup::Chain MpiGroup::ask_along(int rank, Clock::time_point begin, milliseconds every) {
  const auto hold = family_->lock();
  const Clock::time_point now = Clock::now();
  Chain chain{0, rank};
  int at = rank;
  for (int steps = 0; at >= 0 && at < size() && at != this->rank() && steps < size(); ++steps) {
    View& link = views_[static_cast<std::size_t>(at)];
    // A question that was not taken in yet needs no second one.
    // Ranks of this host are asked, too: what they show in shared memory also moves while they wait for others.
    if (now - begin > every && now - link.asked > every && !link.is_asked && !link.is_dead) {
      link.asked = now;
      link.is_asked = true;
      family_->tell(number_of(at), {.kind = ControlKind::ask, .from = family_->rank(), .group = number_});
    }
    chain.progress += link.progress;
    chain.end = at;
    at = link.waits_for;
  }
  // A circle, or one that comes back here: whom this rank waits for is as good as any.
  if (at >= 0) chain.end = rank;
  return chain;
}

void MpiGroup::wait(const std::function<bool()>& done, const std::function<void(std::chrono::nanoseconds)>& sleep,
                    std::span<const int> on, const WaitOptions& options, milliseconds grace, bool may_have_left) {
  struct Seen {
    std::uint64_t progress = 0;
    Clock::time_point since;
  };
  const Clock::time_point begin = Clock::now();
  const milliseconds timeout = sync::timeout_of(options.timeout, this->timeout()) + grace;
  // Several times within the deadline, however short: who is not asked cannot say that it moves.
  const milliseconds every = std::min(asking, timeout / 5);
  const Awaiting awaiting(*this, on.empty() ? -1 : on.front(), options.phase);
  std::vector<Seen> seen(on.size(), Seen{0, begin});
  Clock::time_point looked = begin;
  Clock::time_point logged = begin;
  const auto pump = [&] {
    sync::or_fail(*this, [&] {
      throw_if_resting();
      family_->pump();
    });
  };
  look_around();
  while (!done()) {
    pump();
    if (known_failure()) {
      pass_on_local_failure();
      throw *failure();
    }
    const Clock::time_point now = Clock::now();
    if (now - begin < spinning && !sleep) {
      std::this_thread::yield();
      continue;
    }
    if (options.stop.stop_requested())
      sync::fail(*this, error_of(info(rank()), ErrorKind::cancelled,
                                 fmt::format("{} cancelled '{}'", name_of(info(rank())), options.phase)));
    if (sleep)
      sleep(slice);
    else
      std::this_thread::sleep_for(nap);
    if (now - looked < slice) continue;
    looked = now;
    look_around();
    if (family_->may_call_mpi()) advance_endings();
    if (is_companion()) {
      auto hold = family_->lock();
      const auto dead = std::ranges::find(views_, true, &View::is_dead);
      hold.unlock();
      if (dead != views_.end()) fail_because(static_cast<int>(dead - views_.begin()), "died", options);
    }
    std::vector<int> late;
    for (std::size_t i = 0; i < on.size(); ++i) {
      const Chain chain = ask_along(on[i], begin, every);
      const char* end = nullptr;
      {
        const auto hold = family_->lock();
        const View& view = views_[static_cast<std::size_t>(on[i])];
        if (view.has_left && !may_have_left && now - view.heard > last_messages) end = "left the group";
        if (view.is_dead && !view.has_left) end = "died";
      }
      if (end != nullptr && !done()) fail_because(on[i], end, options);
      if (chain.progress != seen[i].progress) {
        seen[i] = {chain.progress, now};
        local().progress();
      }
      if (now - seen[i].since > timeout && std::ranges::find(late, chain.end) == late.end()) late.push_back(chain.end);
    }
    if (!late.empty() && !done()) time_out(late, now - begin, options);
    // Whoever of this host waits for this rank waits for what it waits for, until its own deadline says whom to blame.
    local().progress();
    if (now - logged > std::chrono::seconds(30)) {
      logged = now;
      std::string names;
      for (const int rank : on) names += (names.empty() ? "" : ", ") + describe(rank);
      log(LogLevel::warning, fmt::format("rank {} has waited {:.0f} s in '{}' for {}", number_of(rank()),
                                         seconds(now - begin), options.phase, names));
    }
  }
}

void MpiGroup::throw_if_dead(int other) const {
  if (!shares_memory(other) || !liveness(other)->is_dead()) return;
  throw error_of(info(other), ErrorKind::peer_lost,
                 fmt::format("{} died while tensors were under way between it and rank {}", name_of(info(other)),
                             number_of(rank())));
}

void MpiGroup::throw_lost(int other, const char* phase, const Error& error) const {
  if (error.kind() != ErrorKind::io) throw Error(error);
  throw error_of(
      info(other), ErrorKind::peer_lost,
      fmt::format("in '{}' of rank {} with {}: {}", phase, number_of(rank()), name_of(info(other)), error.what()));
}

void MpiGroup::fail_because(int other, const char* end, const WaitOptions& options) {
  sync::fail(*this, error_of(info(other), ErrorKind::peer_lost,
                             fmt::format("{} {} while rank {} was in '{}'", name_of(info(other)), end,
                                         number_of(rank()), options.phase)));
}

void MpiGroup::look_around() {
  family_->try_pump();
  // Who is dead now may have told before what all fail with.
  if (!known_failure()) family_->look_for_the_dead();
}

void MpiGroup::time_out(const std::vector<int>& late, Clock::duration waited, const WaitOptions& options) {
  std::string names;
  for (const int rank : late) names += (names.empty() ? "" : ", ") + describe(rank);
  sync::fail(
      *this,
      error_of(info(late.front()), ErrorKind::timeout,
               fmt::format("rank {} waited {:.1f} s in '{}' without progress for {}: look what that process does and "
                           "whether that host can be reached, or raise the timeout (MUSTER_TIMEOUT, seconds)",
                           number_of(rank()), seconds(waited), options.phase, names)));
}

void MpiGroup::do_wait_until(const std::function<bool()>& done,
                             const std::function<void(std::chrono::nanoseconds)>& sleep, std::span<const int> on,
                             const WaitOptions& options) {
  // A local group of one knows neither who it is nor what the other hosts say.
  if ((has_other_hosts() && is_alone_here()) ||
      !std::ranges::all_of(on, [&](int rank) { return hosts_.is_here(rank); })) {
    wait(done, sleep, on, options, milliseconds(0));
    return;
  }
  // What began on another host need not be known to the local group yet.
  if (!done() && known_failure()) {
    pass_on_local_failure();
    throw *failure();
  }
  std::vector<int> places;
  for (const int rank : on) places.push_back(place_of(rank));
  locally(on.empty() ? -1 : on.front(), [&] { local().wait_until(done, sleep, places, later(options)); });
}

}  // namespace muster::mpi
