// SPDX-License-Identifier: Apache-2.0
// Messages of a context, and its end; the numbers are those of context.hpp.

#include "src/hosts/context.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <thread>

#include "muster/log.hpp"

namespace muster::hosts {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Groups' tags begin at 8.
constexpr int control_tag = first_tag;
// A rank that has ended in order may be gone before this one hears that all are through.
constexpr milliseconds last_words{500};
// After a failure there is little hope, but where all live their ends still meet.
constexpr milliseconds patience_after_failure{2000};
// Senders wait so long for what they have under way (sender.cpp).
constexpr milliseconds last_data{1000};

}  // namespace

Control failure_notice(int from, int group, const Error& cause, std::uint32_t round) {
  Control notice{.kind = ControlKind::failure, .from = from, .group = group, .round = round};
  notice.error.put(cause);
  return notice;
}

Context::Context(std::shared_ptr<Transport> transport, milliseconds timeout)
    : transport_(std::move(transport)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      timeout_(timeout),
      has_disconnected_(static_cast<std::size_t>(size_)) {
  open_inbox();
}

bool Context::may_call() const noexcept {
  return stage_.load(std::memory_order_relaxed) < Stage::closed && transport_->may_call();
}

void Context::has_failed() noexcept {
  failed_.store(true);
  last_failure_.store(Clock::now());
}

bool Context::has_just_failed() const noexcept {
  return failed_.load(std::memory_order_relaxed) && Clock::now() - last_failure_.load() < last_data;
}

void Context::enter() {
  if (is_retired()) throw transport_->ended();
  transport_->enter();
}

void Context::introduce(std::vector<RankInfo> ranks, const Hosts& hosts) {
  const auto hold = lock();
  ranks_ = std::move(ranks);
  for (const int rank : hosts.here())
    if (rank != rank_)
      neighbours_[rank] = sync::inside(*hosts.local).liveness(hosts.place_of[static_cast<std::size_t>(rank)]);
  if (hosts.members.size() == 1) return;
  told_ = hosts.told_by(rank_);
  has_other_hosts_.store(true);
}

int Context::next_number() noexcept {
  const auto hold = lock();
  return next_number_++;
}

bool Context::take_number(int number) noexcept {
  const auto hold = lock();
  if (number < next_number_) return false;
  next_number_ = number + 1;
  return true;
}

void Context::add_group(int number, Listener& group) {
  const auto hold = lock();
  groups_.emplace(number, &group);
}

void Context::remove_group(int number) noexcept {
  const auto hold = lock();
  groups_.erase(number);
  if (groups_.empty()) retire();
}

void Context::adopt(int to, Pending send) {
  const auto hold = lock();
  adopted_.push_back({to, std::move(send)});
}

void Context::retire() noexcept {
  const auto hold = lock();
  if (is_retired()) return;
  stage_.store(Stage::disconnecting);
  retired_ = Clock::now();
  try {
    // Step 2.
    if (rank_ != 0) tell(0, {.kind = ControlKind::disconnect, .from = rank_});
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}

void Context::open_inbox() {
  if (!inbox_memory_) inbox_memory_ = std::make_shared<Control>();
  inbox_ = transport_->receive(any_rank, control_tag, std::as_writable_bytes(std::span(inbox_memory_.get(), 1)),
                               inbox_memory_);
}

void Context::tell(int rank, const Control& control) {
  const auto hold = lock();
  if (!may_call()) {
    outbox_.emplace_back(rank, control);
    return;
  }
  // Step 1; but who hears of a failure may be gone before it hears of it again.
  const auto bytes = std::as_bytes(std::span(&control, 1));
  const Finished finished = control.kind == ControlKind::failure ? Finished::sent : Finished::taken;
  reach(rank, [&] {
    sends_.push_back({rank, transport_->send_copy(rank, control_tag, bytes, finished)});
    return true;
  });
}

template <class Call>
bool Context::reach(int rank, const Call& call) {
  try {
    return call();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::io) throw;
  }
  take({.kind = ControlKind::died, .from = rank_, .about = rank});
  return true;
}

void Context::pump() {
  if (!may_call()) return;
  const auto hold = lock();
  if (has_ended()) return;
  pumped_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  for (const auto& [rank, control] : std::exchange(outbox_, {})) tell(rank, control);
  for (std::vector<Sent>* const sends : {&sends_, &adopted_})
    std::erase_if(*sends, [&](Sent& sent) { return reach(sent.to, [&] { return sent.message.test(); }); });
  // Taken back at the end.
  while (inbox_.is_open() && inbox_.test()) {
    const Control control = *inbox_memory_;
    open_inbox();
    take(control);
  }
  for (int lost = transport_->next_lost(); lost != any_rank; lost = transport_->next_lost()) {
    const Control notice{.kind = ControlKind::died, .from = rank_, .about = lost};
    take(notice);
    for (const int rank : told_) tell(rank, notice);
  }
  for (const auto& [owner, hook] : hooks_) hook();
}

void Context::try_pump() noexcept {
  try {
    pump();
  } catch (const std::exception&) {
    // The transport says it again.
  }
}

void Context::add_hook(const void* owner, std::function<void()> hook) {
  const auto hold = lock();
  hooks_[owner] = std::move(hook);
}

void Context::remove_hook(const void* owner) {
  const auto hold = lock();
  hooks_.erase(owner);
}

Clock::duration Context::since_pumped() const noexcept {
  return Clock::now().time_since_epoch() - Clock::duration(pumped_.load(std::memory_order_relaxed));
}

void Context::flush(milliseconds longest) {
  const Clock::time_point until = Clock::now() + longest;
  for (;;) {
    pump();
    {
      const auto hold = lock();
      if (sends_.empty() || !may_call()) return;
    }
    if (Clock::now() > until) return;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Context::take(const Control& control) {
  if (control.from < 0 || control.from >= size_ || control.kind == ControlKind::heard) return;
  if (control.kind == ControlKind::disconnect) {
    const auto from = static_cast<std::size_t>(control.from);
    if (!has_disconnected_[from]) ++disconnected_;
    has_disconnected_[from] = true;
    return;
  }
  if (control.kind == ControlKind::died) {
    has_failed();
    for (const auto& [number, group] : groups_) group->take(control);
    return;
  }
  if (control.group == every_group) {
    // Groups that there still are go on.
    const std::string why = control.error.get().what();
    if (is_retired())
      give_up(why);
    else
      warn_others(why);
    return;
  }
  if (control.kind == ControlKind::failure) {
    has_failed();
    tell(control.from, {.kind = ControlKind::heard, .from = rank_});
  }
  if (const auto found = groups_.find(control.group); found != groups_.end()) {
    found->second->take(control);
    return;
  }
  if (control.kind != ControlKind::ask) return;
  // This rank has left the group already, or has not made it yet: it cannot be that a rank waits in one that others
  // have not made.
  tell(control.from, {.kind = ControlKind::answer, .from = rank_, .group = control.group, .has_left = 1});
}

void Context::end_groups() noexcept {
  const auto hold = lock();
  for (const auto& [number, group] : groups_) group->end();
  groups_.clear();
  retire();
}

void Context::advance() noexcept {
  const auto hold = lock();
  if (!is_retired() || has_ended() || !may_call()) return;
  try {
    pump();
    if (has_ended()) return;
    step();
    if (has_ended()) return;
    look_for_the_dead();
    if (death_seen_ && Clock::now() - *death_seen_ > last_words) give_up(fmt::format("{} died", name_of(dead_)));
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}

void Context::step() {
  switch (stage_.load()) {
    case Stage::disconnecting:
      // Step 3.
      if (!sends_.empty() || !outbox_.empty() || (rank_ == 0 && disconnected_ != size_ - 1)) return;
      barrier_ = transport_->barrier();
      stage_.store(Stage::first_barrier);
      return;
    case Stage::first_barrier:
      if (barrier_.test()) stage_.store(Stage::draining);
      return;
    case Stage::draining:
      // Step 4.
      sweep();
      if (!sends_.empty() || !adopted_.empty()) return;
      barrier_ = transport_->barrier();
      second_barrier_since_ = Clock::now();
      stage_.store(Stage::second_barrier);
      return;
    case Stage::second_barrier:
      sweep();
      if (!barrier_.test()) return;
      second_barrier_took_ = Clock::now() - second_barrier_since_;
      // Step 5.
      inbox_.cancel();
      sweep();
      stage_.store(Stage::closing);
      [[fallthrough]];
    case Stage::closing:
      if (transport_->close()) stage_.store(Stage::closed);
      return;
    case Stage::used:
    case Stage::closed:
    case Stage::given_up:
      return;
  }
}

void Context::sweep() {
  while (const std::unique_ptr<Found> found = transport_->find_any()) {
    if (found->tag() != control_tag || found->bytes() != sizeof(Control)) continue;
    // It has come while the inbox was full.
    const auto control = std::make_shared<Control>();
    Pending pending = found->receive(std::as_writable_bytes(std::span(control.get(), 1)), control);
    while (!pending.test()) std::this_thread::yield();
    take(*control);
  }
}

milliseconds Context::rest() const noexcept {
  return has_other_hosts() ? transport_->rest(second_barrier_took_) : milliseconds(0);
}

void Context::look_for_the_dead() {
  const auto hold = lock();
  const Clock::time_point now = Clock::now();
  if (now - looked_ < milliseconds(20)) return;
  looked_ = now;
  std::erase_if(neighbours_, [&](const auto& neighbour) {
    if (!neighbour.second->is_dead()) return false;
    if (!death_seen_) dead_ = neighbour.first;
    if (!death_seen_) death_seen_ = now;
    const Control notice{.kind = ControlKind::died, .from = rank_, .about = neighbour.first};
    take(notice);
    for (const int rank : told_) tell(rank, notice);
    return true;
  });
}

std::string Context::name_of(int rank) const {
  return ranks_.empty() ? fmt::format("rank {}", rank) : sync::name_of(ranks_[static_cast<std::size_t>(rank)]);
}

std::string Context::missing() const {
  if (rank_ != 0) return sends_.empty() ? "the ranks that " + name_of(0) + " waits for" : name_of(0);
  constexpr int most = 8;
  std::string names;
  int count = 0;
  for (int rank = 1; rank < size_; ++rank)
    if (!has_disconnected_[static_cast<std::size_t>(rank)] && ++count <= most)
      names += (names.empty() ? "" : ", ") + name_of(rank);
  if (count > most) names += fmt::format(" and {} more", count - most);
  return names.empty() ? "the others" : names;
}

void Context::give_up_if_late() noexcept {
  if (is_retired() && failed_.load() && transport_->can_be_dropped()) give_up_after(Clock::now() - retired_);
}

void Context::give_up_after(Clock::duration waited) noexcept {
  const auto hold = lock();
  if (has_ended()) return;
  // Rank 0 knows more: its words come first.
  const milliseconds later(rank_ == 0 ? 0 : 500);
  const milliseconds patience = failed_.load() ? patience_after_failure : timeout_;
  if (!transport_->must_rest() && waited < patience + later) return;
  give_up(fmt::format("rank {} waited {:.1f} s at its end for {}", rank_, std::chrono::duration<double>(waited).count(),
                      missing()));
}

void Context::warn_others(const std::string& why) {
  if (failed_.exchange(true) || !may_call()) return;
  const Control notice = failure_notice(rank_, every_group, Error(ErrorKind::peer_lost, why));
  for (int other = 0; other < size_; ++other)
    if (other != rank_ && (rank_ == 0 || other == 0)) tell(other, notice);
  flush(milliseconds(100));
}

void Context::give_up(const std::string& why) noexcept {
  const auto hold = lock();
  if (has_ended()) return;
  try {
    log(LogLevel::warning, fmt::format("{}: {}", transport_->name(), why));
    warn_others(why);
  } catch (const std::exception&) {
    // They find out by their own deadlines.
  }
  stage_.store(Stage::given_up);
}

}  // namespace muster::hosts
