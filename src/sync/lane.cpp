// SPDX-License-Identifier: Apache-2.0
#include "src/sync/lane.hpp"

#include <string>
#include <system_error>
#include <utility>

#include "muster/work.hpp"
#include "src/os/process.hpp"
#include "src/sync/failing.hpp"

namespace muster {

void detail::refuse_empty_work() {
  throw Error(ErrorKind::argument, "a Work without an operation: its result has been taken, or there was never one");
}

void detail::refuse_second_get() {
  throw Error(ErrorKind::argument, "two threads take the result of one Work: only one of them can have it");
}

namespace sync {
namespace {

thread_local bool is_of_a_lane = false;

}  // namespace

Lane::Lane(SyncGroup& group)
    : group_(group.weak_from_this()),
      own_(group.duplicate({.phase = "asynchronous calls: setting up"})),
      owner_(os::process_id()) {}

Lane::~Lane() {
  if (os::process_id() != owner_) {
    // A forked child has no such thread to wait for.
    (void)thread_.release();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_one();
  if (thread_) thread_->join();
}

bool Lane::is_this_thread() noexcept {
  return is_of_a_lane;
}

void Lane::add(std::function<void()> task) {
  or_fail(*own_, [&] {
    const std::lock_guard lock(mutex_);
    try {
      if (!thread_) thread_ = std::make_unique<std::thread>([this] { run(); });
    } catch (const std::system_error& error) {
      throw Error(ErrorKind::no_space, std::string("no thread for asynchronous calls: ") + error.what() +
                                           "; raise the limit of processes (ulimit -u), or make the calls that wait");
    }
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  });
}

void Lane::pass_on_failure() noexcept {
  if (const auto cause = own_->failure())
    if (const auto group = group_.lock()) group->poison(*cause);
}

void Lane::run() {
  is_of_a_lane = true;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return is_ending_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    // It stays where it is while others are added behind it.
    const std::function<void()>& task = tasks_.front();
    lock.unlock();
    task();
    lock.lock();
    // Only now: while it runs, the group is in use.
    tasks_.pop_front();
  }
}

}  // namespace sync
}  // namespace muster
