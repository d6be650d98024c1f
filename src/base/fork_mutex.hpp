// SPDX-License-Identifier: Apache-2.0
#pragma once
// Locks and process-wide state that a forked child can use. A forked child has one thread. If another thread of the
// parent held a std::mutex at the fork, that mutex stays locked in the child for ever, and the state that it protects
// may be inconsistent.

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "muster/error.hpp"

namespace muster {

/// A mutex whose lock() never blocks for ever in a forked child. If a thread of the parent held it at the fork, lock()
/// throws Error(unsupported) in the child, and try_lock() returns false. A destructor or noexcept function that may run
/// in a child must call lock_unless_abandoned() instead, or first check that it runs in the process that made the
/// object. Works with std::lock_guard, std::unique_lock and std::condition_variable_any.
class ForkMutex {
 public:
  ForkMutex& operator=(ForkMutex&&) = delete;

  void lock() {
    if (!acquire())
      throw Error(ErrorKind::unsupported,
                  "forked process: using an object of the parent: another thread of the parent used it during fork(). "
                  "Start the process with exec, or make its own objects after fork()");
  }
  /// Locks the mutex without throwing: if lock() would throw, the returned lock does not own the mutex.
  [[nodiscard]] std::unique_lock<ForkMutex> lock_unless_abandoned() noexcept {
    if (acquire()) return {*this, std::adopt_lock};
    return {*this, std::defer_lock};
  }
  bool try_lock() noexcept {
    pid_t holder = 0;
    return holder_.compare_exchange_strong(holder, ::getpid(), std::memory_order_acquire);
  }
  void unlock() noexcept;

 private:
  /// Returns false if lock() must throw. Only libmuster defines acquire() and unlock(): std::atomic::wait counts
  /// waiting threads per shared object, so an unlock() that another shared object compiles would not wake threads that
  /// wait here.
  bool acquire() noexcept;

  std::atomic<pid_t> holder_{0};  // ID of the process whose thread holds the mutex; 0: it is free
};

/// A ForkMutex that one thread may lock several times.
class RecursiveForkMutex {
 public:
  void lock() {
    if (owner_.load(std::memory_order_relaxed) != std::this_thread::get_id()) {
      mutex_.lock();
      owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    ++depth_;
  }
  void unlock() noexcept {
    if (--depth_ != 0) return;
    owner_.store({}, std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  ForkMutex mutex_;
  std::atomic<std::thread::id> owner_{};
  int depth_ = 0;
};

/// Holds one T per process. The T is created at first use, and never destroyed, because other static objects may use it
/// at exit. A forked child gets a new T.
template <class T>
class PerProcess {
 public:
  T& operator*() {
    const pid_t self = ::getpid();
    ForkRecord* node = node_.load(std::memory_order_acquire);
    if (node != nullptr && node->process == self) return node->value;
    auto* const fresh = new ForkRecord{self, node, {}};
    // The pointer to the parent's node keeps that node reachable for leak checkers.
    if (node_.compare_exchange_strong(node, fresh, std::memory_order_acq_rel)) return fresh->value;
    delete fresh;
    return node->value;
  }
  T* operator->() { return &**this; }

 private:
  struct ForkRecord {
    pid_t process;
    ForkRecord* parents;
    T value;
  };
  std::atomic<ForkRecord*> node_{nullptr};
};

}  // namespace muster
