// SPDX-License-Identifier: Apache-2.0
// The messages of a context, and its end. The step numbers are those of context.hpp.

#include "src/multihost/context.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include "muster/log.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/os/clock.hpp"
#include "src/os/fault.hpp"
#include "src/os/fd.hpp"

namespace muster::multihost {
namespace {

using Clock = os::Clock;
using std::chrono::milliseconds;

// The tags of groups begin at 8.
constexpr int control_tag = first_tag;
// A message of a dead rank of this host may still arrive.
constexpr milliseconds last_words{500};
// From the second barrier on, a dead rank has probably ended in order, and this rank learns soon that all ranks are
// finished. With many ranks per core that takes seconds.
constexpr milliseconds last_words_at_the_end{5000};
// After a failure success is unlikely. But if all ranks are alive, they still end within this time.
constexpr milliseconds patience_after_failure{2000};
// A rank that waits longer at its end for a rank below it reports that rank upwards.
constexpr milliseconds late_end{1000};
// The time that senders wait for their messages in flight (sender.cpp).
constexpr milliseconds last_data{1000};

}  // namespace

Context::Context(std::shared_ptr<Transport> transport, milliseconds timeout)
    : transport_(std::move(transport)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      timeout_(timeout),
      deliveries_(size_, [this](int rank, const Control& control) { tell(rank, control); }) {
  for (const int rank : rank_tree().children(rank_)) connected_below_.emplace(rank, rank);
  open_inbox();
}

bool Context::may_call() const noexcept {
  return stage_.load(std::memory_order_relaxed) < ConnectionStage::closed && transport_->may_call();
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

void Context::introduce(const HostsMembership& members) {
  const auto hold = lock();
  ranks_ = members.ranks;
  hosts_ = members.hosts;
  for (const int rank : hosts_->here())
    if (rank != rank_)
      neighbours_[rank] = group::inside(*members.local).liveness(hosts_->place_of[static_cast<std::size_t>(rank)]);
  has_other_hosts_.store(hosts_->members.size() > 1);
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

void Context::add_group(int number, ControlListener& group) {
  const auto hold = lock();
  groups_.emplace(number, &group);
}

void Context::remove_group(int number) noexcept {
  const auto hold = lock();
  groups_.erase(number);
  if (groups_.empty()) retire();
}

void Context::adopt(int to, PendingTransfer send) {
  const auto hold = lock();
  adopted_.push_back({to, std::move(send)});
}

void Context::retire() noexcept {
  const auto hold = lock();
  if (is_retired()) return;
  stage_.store(ConnectionStage::disconnecting);
  retired_ = Clock::now();
  try {
    tell_end();
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}

void Context::open_inbox() {
  if (!inbox_memory_) inbox_memory_ = std::make_shared<Control>();
  inbox_ = transport_->receive(any_rank, control_tag, std::as_writable_bytes(std::span(inbox_memory_.get(), 1)),
                               inbox_memory_);
}

bool Context::has_mail() {
  try {
    return inbox_.test();
  } catch (const Error&) {
    // A failed message must not prevent this rank from receiving the next ones.
    open_inbox();
    throw;
  }
}

void Context::tell(int rank, const Control& control) {
  const auto hold = lock();
  if (!may_call()) {
    outbox_.emplace_back(rank, control);
    return;
  }
  // Step 1. Exception: a rank that receives a message about a failure may end before it receives the next one.
  const auto bytes = std::as_bytes(std::span(&control, 1));
  const bool is_about_failure = control.kind == ControlKind::notice || control.kind == ControlKind::decision ||
                                control.kind == ControlKind::confirm;
  if (is_about_failure && os::is_faulty("send", "about a failure"))
    throw os::errno_error(fmt::format("sending to rank {}", rank));
  const SendEnd finished = is_about_failure ? SendEnd::sent : SendEnd::taken;
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
    if (error.kind() != ErrorKind::io || os::is_own_shortage(error.os_error())) throw;
  }
  lose(rank);
  return true;
}

void Context::reply(int rank, const Control& control) noexcept {
  try {
    tell(rank, control);
  } catch (const std::exception&) {
    // The other rank asks again, or can do without the message.
  }
}

void Context::lose(int rank) {
  take({.kind = ControlKind::died, .from = rank_, .about = rank});
}

void Context::ask_about(int rank) {
  constexpr int most = 3;
  int asked = 0;
  const auto hold = lock();
  for (const int mate : hosts_->on(hosts_->host_of[static_cast<std::size_t>(rank)])) {
    if (mate == rank || mate == rank_ || asked++ >= most) continue;
    // A rank that does not receive its pending messages needs no more of them.
    if (std::ranges::find(sends_, mate, &Sent::to) == sends_.end())
      tell(mate, {.kind = ControlKind::ask, .from = rank_, .about = rank});
  }
}

void Context::pump() {
  if (!may_call()) return;
  const auto hold = lock();
  if (has_ended()) return;
  pumped_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  for (const auto& [rank, control] : std::exchange(outbox_, {})) tell(rank, control);
  for (std::vector<Sent>* const sends : {&sends_, &adopted_})
    std::erase_if(*sends, [&](Sent& sent) { return reach(sent.to, [&] { return sent.message.test(); }); });
  // The inbox is cancelled at the end.
  while (inbox_.is_open() && has_mail()) {
    const Control control = *inbox_memory_;
    open_inbox();
    take(control);
  }
  for (int lost = transport_->next_lost(); lost != any_rank; lost = transport_->next_lost()) lose(lost);
  deliveries_.advance();
  for (const auto& [owner, hook] : hooks_) hook();
}

void Context::try_pump() noexcept {
  try {
    pump();
  } catch (const std::exception&) {
    // The transport reports the error again.
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

void Context::take(const Control& control) {
  if (control.from < 0 || control.from >= size_) return;
  if (control.from != rank_) deliveries_.hear_from(control.from);
  switch (control.kind) {
    case ControlKind::disconnect: {
      const auto found = connected_below_.find(control.from);
      if (found == connected_below_.end() || control.about >= size_) return;
      if (control.about < 0)
        connected_below_.erase(found);
      else
        found->second = control.about;
      if (is_late_told_ && !connected_below_.empty()) tell_missing();
      return;
    }
    case ControlKind::died:
      if (control.about < 0 || control.about >= size_) return;
      has_failed();
      deliveries_.lose(control.about);
      for (const auto& [number, group] : groups_) group->take(control);
      return;
    case ControlKind::confirm:
      return deliveries_.confirm(control);
    case ControlKind::ask:
      if (control.about < 0) break;
      look_for_the_dead();
      if (std::ranges::find(dead_, control.about) != dead_.end())
        reply(control.from, {.kind = ControlKind::died, .from = rank_, .about = control.about});
      return;
    case ControlKind::notice:
    case ControlKind::decision:
      if (control.group != every_group) return take_failure(control);
      // Groups that still exist remain usable.
      if (const std::string why = control.error.get().what(); is_retired())
        give_up(why);
      else
        warn_others(why);
      return;
    case ControlKind::left:
    case ControlKind::answer:
      break;
  }
  if (const auto found = groups_.find(control.group); found != groups_.end()) {
    found->second->take(control);
    return;
  }
  // This rank has left the group already, or has not made it yet. No rank can wait in a group that other ranks have not
  // made.
  if (control.kind == ControlKind::ask)
    reply(control.from, {.kind = ControlKind::answer, .from = rank_, .group = control.group, .has_left = 1});
}

void Context::take_failure(const Control& control) {
  has_failed();
  Control answer{.kind = ControlKind::confirm, .from = rank_, .group = control.group, .serial = control.serial};
  if (const auto found = groups_.find(control.group); found != groups_.end()) {
    found->second->take(control);
    if (const auto decision = found->second->decision()) {
      answer.is_decided = 1;
      answer.error.put(*decision);
    }
  } else {
    answer.has_left = 1;
  }
  reply(control.from, answer);
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
    if (death_seen_ && Clock::now() - *death_seen_ > (may_have_ended() ? last_words_at_the_end : last_words))
      give_up(fmt::format("{} died", name_of(dead_.front())));
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}

void Context::step() {
  switch (stage_.load()) {
    case ConnectionStage::disconnecting:
      tell_end();
      if (!connected_below_.empty()) {
        if (rank_ != 0 && !is_late_told_ && Clock::now() - retired_ > std::min(late_end, patience() / 2))
          tell_missing();
        return;
      }
      // Step 3.
      if (!sends_.empty() || !outbox_.empty()) return;
      deliveries_.clear();
      barrier_ = transport_->barrier();
      stage_.store(ConnectionStage::first_barrier);
      return;
    case ConnectionStage::first_barrier:
      if (barrier_.test()) stage_.store(ConnectionStage::draining);
      return;
    case ConnectionStage::draining:
      // Step 4.
      if (!sweep() || !sends_.empty() || !adopted_.empty()) return;
      barrier_ = transport_->barrier();
      second_barrier_since_ = Clock::now();
      stage_.store(ConnectionStage::second_barrier);
      return;
    case ConnectionStage::second_barrier:
      sweep();
      if (!barrier_.test()) return;
      second_barrier_took_ = Clock::now() - second_barrier_since_;
      // Step 5.
      inbox_.cancel();
      stage_.store(ConnectionStage::closing);
      [[fallthrough]];
    case ConnectionStage::closing:
      if (sweep() && transport_->close()) stage_.store(ConnectionStage::closed);
      return;
    case ConnectionStage::used:
    case ConnectionStage::closed:
    case ConnectionStage::given_up:
      return;
  }
}

bool Context::sweep() {
  while (const std::unique_ptr<ArrivedMessage> found = transport_->find_any()) {
    if (found->tag() != control_tag || found->bytes() != sizeof(Control)) continue;
    const auto control = std::make_shared<Control>();
    late_.emplace_back(control, found->receive(std::as_writable_bytes(std::span(control.get(), 1)), control));
  }
  std::erase_if(late_, [this](auto& one) {
    try {
      if (!one.second.test()) return false;
    } catch (const Error&) {
      // The sender has died in the meantime.
      return true;
    }
    take(*one.first);
    return true;
  });
  return late_.empty();
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
    if (!death_seen_) death_seen_ = now;
    dead_.push_back(neighbour.first);
    return true;
  });
  if (may_have_ended()) return;
  for (; passed_on_ < dead_.size(); ++passed_on_) lose(dead_[passed_on_]);
}

std::string Context::name_of(int rank) const {
  return ranks_ == nullptr ? fmt::format("rank {}", rank) : group::name_of((*ranks_)[rank]);
}

void Context::tell_end() {
  if (rank_ == 0 || has_told_end_ || !connected_below_.empty()) return;
  has_told_end_ = true;
  tell(rank_tree().parent(rank_), {.kind = ControlKind::disconnect, .from = rank_});
}

void Context::tell_missing() {
  is_late_told_ = true;
  tell(rank_tree().parent(rank_),
       {.kind = ControlKind::disconnect, .from = rank_, .about = connected_below_.begin()->second});
}

std::string Context::missing() const {
  std::string names;
  for (const auto& [below, rank] : connected_below_) names += (names.empty() ? "" : ", ") + name_of(rank);
  if (!names.empty()) return names;
  if (rank_ == 0) return "the other ranks";
  return sends_.empty() ? "the ranks that " + name_of(0) + " waits for" : name_of(rank_tree().parent(rank_));
}

void Context::give_up_if_late() noexcept {
  if (is_retired() && failed_.load() && transport_->can_be_dropped()) give_up_after(Clock::now() - retired_);
}

milliseconds Context::patience() const noexcept {
  return failed_.load() ? patience_after_failure : timeout_;
}

void Context::give_up_after(Clock::duration waited) noexcept {
  const auto hold = lock();
  if (has_ended()) return;
  // Rank 0 knows more than the other ranks, so its message must come first.
  const milliseconds later(rank_ == 0 ? 0 : 500);
  if (!transport_->must_rest() && waited < patience() + later) return;
  give_up(fmt::format("rank {} waited {:.1f} s at its end for {}", rank_, std::chrono::duration<double>(waited).count(),
                      missing()));
}

void Context::warn_others(const std::string& why) {
  if (failed_.exchange(true) || !may_call()) return;
  Control notice{.kind = ControlKind::notice, .from = rank_};
  notice.error.put(Error(ErrorKind::peer_lost, why));
  // Each rank forwards it once.
  const HostTree tree = rank_tree();
  for (const int child : tree.children(rank_)) reply(child, notice);
  if (rank_ != 0) reply(tree.parent(rank_), notice);
  const Clock::time_point until = Clock::now() + milliseconds(100);
  for (pump(); !sends_.empty() && may_call() && Clock::now() < until; pump())
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Context::give_up(const std::string& why) noexcept {
  const auto hold = lock();
  if (has_ended()) return;
  try {
    log(LogLevel::warning, fmt::format("{}: {}", transport_->name(), why));
    warn_others(why);
  } catch (const std::exception&) {
    // The other ranks notice it at their own deadlines.
  }
  stage_.store(ConnectionStage::given_up);
}

// The contexts of this process, and how they end together.
namespace {

using Clock = os::Clock;

struct Contexts {
  ForkMutex mutex;
  std::vector<std::shared_ptr<Context>> all;
  std::map<std::string_view, std::chrono::milliseconds> rests;  // by kind: the maximum of the contexts that have closed
};

/// A forked child has no contexts: its copies belong to the parent.
Contexts& contexts() {
  static constinit PerProcess<Contexts> the_contexts;
  return *the_contexts;
}

std::vector<std::shared_ptr<Context>> list(std::string_view kind) {
  Contexts& them = contexts();
  const std::lock_guard lock(them.mutex);
  std::vector<std::shared_ptr<Context>> found;
  for (const std::shared_ptr<Context>& context : them.all)
    if (context->transport().kind() == kind) found.push_back(context);
  return found;
}

void forget_ended() {
  Contexts& them = contexts();
  const std::lock_guard lock(them.mutex);
  std::erase_if(them.all, [&them](const std::shared_ptr<Context>& context) {
    if (!context->is_closed()) return context->has_ended() && context->transport().can_be_dropped();
    // This also applies if the context ends long before the transport: the other ranks may notice its end late.
    std::chrono::milliseconds& rest = them.rests[context->transport().kind()];
    rest = std::max(rest, context->rest());
    return true;
  });
}

/// Returns the rest only once, because the end of a transport may call end_all() again.
std::chrono::milliseconds take_rest(std::string_view kind) {
  Contexts& them = contexts();
  const std::lock_guard lock(them.mutex);
  return std::exchange(them.rests[kind], std::chrono::milliseconds(0));
}

}  // namespace

void keep(std::shared_ptr<Context> context) {
  Contexts& them = contexts();
  const std::lock_guard lock(them.mutex);
  them.all.push_back(std::move(context));
}

void advance_endings(std::string_view kind) noexcept {
  try {
    bool has_some = false;
    for (const std::shared_ptr<Context>& context : list(kind)) {
      if (!context->is_retired()) continue;
      context->take_over();
      context->advance();
      context->give_up_if_late();
      has_some = has_some || context->has_ended();
    }
    if (has_some) forget_ended();
  } catch (const std::bad_alloc&) {
    // The next call removes them.
  }
}

bool end_all(std::string_view kind) noexcept {
  try {
    const std::vector<std::shared_ptr<Context>> all = list(kind);
    for (const std::shared_ptr<Context>& context : all) {
      context->take_over();
      context->end_groups();
    }
    const Clock::time_point begin = Clock::now();
    const auto has_ended = [](const std::shared_ptr<Context>& context) { return context->has_ended(); };
    while (!std::ranges::all_of(all, has_ended)) {
      for (const std::shared_ptr<Context>& context : all) {
        if (context->has_ended()) continue;
        context->advance();
        context->give_up_after(Clock::now() - begin);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    forget_ended();
    std::chrono::milliseconds rest = take_rest(kind);
    for (const std::shared_ptr<Context>& context : all) rest = std::max(rest, context->rest());
    std::this_thread::sleep_for(rest);
    return std::ranges::all_of(all, [](const std::shared_ptr<Context>& context) { return context->is_closed(); });
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace muster::multihost
