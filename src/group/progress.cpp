// SPDX-License-Identifier: Apache-2.0
#include "src/group/progress.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/group.hpp"
#include "src/group/mail.hpp"

namespace muster::group {
namespace {

using Clock = RankProgress::Clock;

// For this long after a message has moved, a wait only yields its core: the next message is likely to follow soon.
constexpr std::chrono::microseconds busy{50};
// A nap is this fraction of the time since the last message moved, so that a long wait leaves its core to other
// threads.
constexpr std::chrono::microseconds shortest_nap{50};
constexpr int naps_a_wait = 64;
// Even without messages in flight, a wait runs a step this often: other ranks may be waiting for free space in this
// rank's buffers.
constexpr std::chrono::milliseconds glance{20};
// The minimum interval between two reports to other ranks that this one makes progress.
constexpr std::chrono::milliseconds telling{20};

struct Groups {
  std::mutex mutex;
  std::vector<BaseGroup*> all;
  std::atomic<int> pending{0};
  std::atomic<Clock::time_point> told{};
};

/// A forked child starts with an empty list, without the parent's groups.
Groups& groups() {
  static constinit PerProcess<Groups> all;
  return *all;
}

thread_local bool is_stepping = false;

struct Stepping {
  Stepping() { is_stepping = true; }
  ~Stepping() { is_stepping = false; }
};

/// Runs one step of the mail of one group. Returns true if a message moved.
bool step_mail(BaseGroup& group, std::vector<std::shared_ptr<const void>>& ended) {
  const BaseGroup::Hold hold(group, BaseGroup::Hold::Kind::progress);
  if (!hold || !group.mail().needs_steps()) return false;
  bool has_moved = false;
  try {
    if (group.has_failure())
      group.mail().abandon();
    else if (group.may_move())
      has_moved = group.mail().step();
  } catch (const std::bad_alloc&) {
    // Other ranks wait for the packets of this rank.
    try {
      group.abort(in_own_name(group, Error(ErrorKind::out_of_space, "out of memory")));
    } catch (const std::bad_alloc&) {
      // The other ranks notice it at their deadlines.
    }
    group.mail().abandon();
  } catch (const std::exception&) {
    // The group has failed: its own calls throw this error.
    group.mail().abandon();
  }
  for (auto& each : group.mail().take_ended()) ended.push_back(std::move(each));
  return has_moved;
}

}  // namespace

void RankProgress::add(BaseGroup& group) {
  Groups& them = groups();
  const std::lock_guard lock(them.mutex);
  them.all.push_back(&group);
}

void RankProgress::remove(BaseGroup& group) noexcept {
  Groups& them = groups();
  const std::lock_guard lock(them.mutex);
  std::erase(them.all, &group);
}

void RankProgress::exchange_groups(std::vector<BaseGroup*>& groups) noexcept {
  Groups& them = group::groups();
  const std::lock_guard lock(them.mutex);
  std::swap(them.all, groups);
}

void RankProgress::add_pending(int count) noexcept {
  groups().pending.fetch_add(count, std::memory_order_relaxed);
}

void RankProgress::moved() noexcept {
  Groups& them = groups();
  const Clock::time_point now = Clock::now();
  if (now - them.told.load(std::memory_order_relaxed) < telling) return;
  them.told.store(now, std::memory_order_relaxed);
  // step() already holds the lock when it calls this function.
  std::unique_lock lock(them.mutex, std::defer_lock);
  if (!is_stepping && !lock.try_lock()) return;
  for (BaseGroup* const group : them.all) group->progress();
}

namespace {

/// Runs one step of the mail of all groups. Returns whether a message moved; nullopt if another thread runs a step.
std::optional<bool> step_all(Groups& them) {
  std::vector<std::shared_ptr<const void>> ended;  // dropped without the lock
  const std::unique_lock lock(them.mutex, std::try_to_lock);
  if (!lock) return std::nullopt;
  const Stepping stepping;
  bool has_moved = false;
  for (BaseGroup* const group : them.all) has_moved = step_mail(*group, ended) || has_moved;
  return has_moved;
}

}  // namespace

void RankProgress::step_pending() {
  if (!is_stepping && groups().pending.load(std::memory_order_relaxed) != 0) (void)step_all(groups());
}

std::chrono::nanoseconds RankProgress::step(std::chrono::nanoseconds longest) {
  if (is_stepping) return longest;
  Groups& them = groups();
  const bool is_pending = them.pending.load(std::memory_order_relaxed) != 0;
  const Clock::time_point now = Clock::now();
  if (!is_pending && now - looked_ < glance) return longest;
  looked_ = now;
  const std::optional<bool> stepped = step_all(them);
  if (!stepped) return std::min<std::chrono::nanoseconds>(longest, std::chrono::milliseconds(1));
  const bool has_moved = *stepped;
  if (has_moved) moved_ = now;
  if (!is_pending && !has_moved) return longest;
  if (now - moved_ < busy) return std::chrono::nanoseconds(0);
  return std::min<std::chrono::nanoseconds>(
      longest, std::max<std::chrono::nanoseconds>((now - moved_) / naps_a_wait, shortest_nap));
}

}  // namespace muster::group
