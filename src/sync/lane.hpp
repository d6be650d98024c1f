// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lane: what runs the asynchronous calls of a group: one thread, and a duplicate of the group that it alone uses.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "muster/sync_group.hpp"

namespace muster::sync {

/// Runs what it is given, in that order. Its end waits for all of it.
class Lane {
 public:
  /// Collective over `group`. Throws as SyncGroup::duplicate.
  explicit Lane(SyncGroup& group);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// Whether this thread is that of some Lane.
  [[nodiscard]] static bool is_this_thread() noexcept;
  /// The duplicate: for its tasks.
  [[nodiscard]] const std::shared_ptr<SyncGroup>& own() const noexcept { return own_; }
  /// What this fails with is the failure of the group: the other ranks wait for the task.
  void add(std::function<void()> task);
  /// What the duplicate has failed with fails the group, too.
  void pass_on_failure() noexcept;
  /// call(own), now, if nothing is under way.
  template <class Call>
  void if_idle(const Call& call) {
    const std::lock_guard lock(mutex_);
    if (tasks_.empty() && !own_->failure()) call(*own_);
  }

 private:
  void run();

  std::weak_ptr<SyncGroup> group_;
  std::shared_ptr<SyncGroup> own_;
  std::int64_t owner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool is_ending_ = false;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace muster::sync
