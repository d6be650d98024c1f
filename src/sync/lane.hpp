// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lane: what runs the asynchronous calls of a group: one thread, and a duplicate of the group that it alone uses.

#include <functional>
#include <memory>

#include "muster/sync_group.hpp"
#include "src/os/thread.hpp"

namespace muster::sync {

/// Runs what it is given, in that order. Its end waits for all of it. The group that has it ends it before anything
/// else of itself (Group::end_progress), so the thread uses that group without owning it. A task may own the last
/// reference to the group: then the group, and with it the lane, ends on the lane's own thread, which still runs what
/// is left.
class Lane {
 public:
  /// What the thread and the tasks use: they may outlive the lane.
  class Tasks;

  /// Collective over `group`. Throws as SyncGroup::duplicate.
  explicit Lane(SyncGroup& group);
  ~Lane();
  Lane& operator=(Lane&&) = delete;

  /// Whether this thread is that of some Lane.
  [[nodiscard]] static bool is_this_thread() noexcept;
  /// The duplicate: for its tasks.
  [[nodiscard]] const std::shared_ptr<SyncGroup>& own() const noexcept;
  [[nodiscard]] const std::shared_ptr<Tasks>& tasks() const noexcept { return tasks_; }
  /// Keeps what its tasks use for as long as its thread runs.
  void keep(std::shared_ptr<void> used);
  /// If this fails, the group fails, because the other ranks wait for the task.
  void add(std::function<void()> task);
  /// If the duplicate has failed, the group fails for the same cause. On the lane's thread.
  static void pass_on_failure(Tasks& tasks) noexcept;
  /// call(own), now, if nothing is under way.
  void if_idle(const std::function<void(SyncGroup&)>& call);

 private:
  std::shared_ptr<Tasks> tasks_;
  os::Thread thread_;
};

}  // namespace muster::sync
