// SPDX-License-Identifier: Apache-2.0
#pragma once
// AsyncExecutor: runs the asynchronous calls of a group. It has one thread, and a duplicate of the group that only this
// thread uses.

#include <functional>
#include <memory>

#include "muster/group.hpp"
#include "src/os/thread.hpp"

namespace muster::group {

/// Runs its tasks in the order in which they were added. The destructor waits for all of them. The group owns the
/// executor and destroys it before its other members (BaseGroup::end_progress), so the thread uses the group without
/// owning it. A task may own the last reference to the group. The group and its executor are then destroyed on the
/// executor's own thread, which still runs the remaining tasks.
class AsyncExecutor {
 public:
  /// The data that the thread and the tasks use. It may outlive the executor.
  class Tasks;

  /// Collective over `group`. Throws as Group::duplicate.
  explicit AsyncExecutor(Group& group);
  ~AsyncExecutor();
  AsyncExecutor& operator=(AsyncExecutor&&) = delete;

  /// Returns whether the calling thread is the thread of an AsyncExecutor.
  [[nodiscard]] static bool is_this_thread() noexcept;
  /// Returns the duplicate, which only tasks may use.
  [[nodiscard]] const std::shared_ptr<Group>& own() const noexcept;
  [[nodiscard]] const std::shared_ptr<Tasks>& tasks() const noexcept { return tasks_; }
  /// Keeps an object that the tasks use alive until the thread ends.
  void keep(std::shared_ptr<void> used);
  /// Adds a task. If this fails, the group fails, because the other ranks wait for the task.
  void add(std::function<void()> task);
  /// If the duplicate has failed, fails the group with the same cause. Called on the executor's thread.
  static void pass_on_failure(Tasks& tasks) noexcept;
  /// Waits until no task is pending. The waits of tasks have deadlines.
  void wait_idle();
  /// Runs call(own) on the calling thread if no task is pending.
  void if_idle(const std::function<void(Group&)>& call);

 private:
  std::shared_ptr<Tasks> tasks_;
  os::Thread thread_;
};

}  // namespace muster::group
