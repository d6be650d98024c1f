// SPDX-License-Identifier: Apache-2.0
#include "src/group/async_executor.hpp"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <utility>

#include "muster/work.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/clock.hpp"
#include "src/os/process.hpp"

namespace muster {

void detail::refuse_empty_work() {
  throw Error(ErrorKind::invalid_argument,
              "Work: it has no operation: its result has already been taken, or it was never started");
}

void detail::refuse_second_get() {
  throw Error(ErrorKind::invalid_argument,
              "Work: taking the result: another thread is already taking it. Take it in one thread only");
}

std::int64_t detail::own_process() noexcept {
  return os::process_id();
}

void detail::check_process(std::int64_t process) {
  if (process != os::process_id())
    throw Error(ErrorKind::unsupported,
                "Work: using it in a forked process: only the parent has its result. Take the result in the parent");
}

bool detail::wait_in_parts(std::chrono::milliseconds time, const std::function<bool(std::chrono::milliseconds)>& wait) {
  const os::Clock::time_point end = os::Clock::now() + group::bounded(time);
  for (;;) {
    const auto part = os::Clock::next_sleep(end);
    if (wait(part)) return true;
    if (part == part.zero()) return false;
  }
}

namespace group {
namespace {

thread_local bool is_of_a_lane = false;

}  // namespace

class AsyncExecutor::Tasks {
 public:
  explicit Tasks(Group& its_group)
      : group(&its_group), own(its_group.duplicate({.phase = "asynchronous calls: setting up"})) {}

  void run() {
    is_of_a_lane = true;
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return is_ending || !waiting.empty(); });
      if (waiting.empty()) return;
      // The task stays in the queue while other threads append to it.
      std::function<void()>& task = waiting.front();
      lock.unlock();
      task();
      // The task may own the group, and so destroy the lane.
      task = nullptr;
      lock.lock();
      // The entry is removed only now, because the group counts as in use while the task runs.
      waiting.pop_front();
      changed.notify_all();
    }
  }

  Group* group;  // null after the lane has been destroyed on its own thread
  std::shared_ptr<Group> own;
  std::shared_ptr<void> kept;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> waiting;
  bool is_ending = false;
};

AsyncExecutor::AsyncExecutor(Group& group) : tasks_(std::make_shared<Tasks>(group)) {}

AsyncExecutor::~AsyncExecutor() {
  if (thread_.is_of_other_process()) {
    // In a forked child: another thread of the parent may have been changing this data during the fork.
    if (auto* const kept = new (std::nothrow) std::shared_ptr<Tasks>) kept->swap(tasks_);
    return;
  }
  const bool is_own_thread = thread_.is_this();
  {
    const std::lock_guard lock(tasks_->mutex);
    tasks_->is_ending = true;
    if (is_own_thread) tasks_->group = nullptr;
  }
  tasks_->changed.notify_all();
  if (is_own_thread) thread_.detach();
}

bool AsyncExecutor::is_this_thread() noexcept {
  return is_of_a_lane;
}

const std::shared_ptr<Group>& AsyncExecutor::own() const noexcept {
  return tasks_->own;
}

void AsyncExecutor::keep(std::shared_ptr<void> used) {
  tasks_->kept = std::move(used);
}

void AsyncExecutor::add(std::function<void()> task) {
  or_fail(*own(), [&] {
    const std::lock_guard lock(tasks_->mutex);
    if (!thread_.is_started()) thread_ = os::Thread("asynchronous calls", [tasks = tasks_] { tasks->run(); });
    tasks_->waiting.push_back(std::move(task));
    tasks_->changed.notify_all();
  });
}

void AsyncExecutor::pass_on_failure(Tasks& tasks) noexcept {
  if (tasks.group == nullptr) return;
  if (const auto cause = tasks.own->error()) tasks.group->abort(*cause);
}

void AsyncExecutor::wait_idle() {
  std::unique_lock lock(tasks_->mutex);
  tasks_->changed.wait(lock, [&] { return tasks_->waiting.empty(); });
}

void AsyncExecutor::if_idle(const std::function<void(Group&)>& call) {
  if (own()->error()) return;
  const std::lock_guard lock(tasks_->mutex);
  if (tasks_->waiting.empty()) call(*own());
}

}  // namespace group
}  // namespace muster
