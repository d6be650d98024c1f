// SPDX-License-Identifier: Apache-2.0
#pragma once
// Locks and process-wide state that a forked child can use. A child has one thread. A std::mutex that another thread of
// the parent held at the fork stays locked there for ever, and the state that it protects may be half written.

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "muster/error.hpp"

namespace muster {

/// A mutex whose lock() never blocks in a forked child. If a thread of the parent held it at the fork, lock() throws
/// Error(unsupported) in the child, and try_lock() returns false. A destructor or a noexcept function that a child may
/// reach calls lock_unless_abandoned(), or first compares the process with the one that made the object. For
/// std::lock_guard, std::unique_lock and std::condition_variable_any.
class ForkMutex {
 public:
  ForkMutex& operator=(ForkMutex&&) = delete;

  void lock() {
    if (!acquire())
      throw Error(ErrorKind::unsupported,
                  "this process was forked while another thread of its parent used the same object: a forked child "
                  "cannot take part; start it as a process of its own");
  }
  /// The same without an exception: the result holds nothing where lock() would throw.
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
  /// False where lock() throws. This and unlock() are defined in the library alone: each shared object has its own
  /// count of waiting threads, so a copy of unlock() in another one would not wake those that wait here.
  bool acquire() noexcept;

  std::atomic<pid_t> holder_{0};  // the process whose thread holds it
};

/// The same for one thread that locks it several times.
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

/// One T for each process, made at first use and never destroyed: other statics may still use it at exit. A forked
/// child gets a new one.
template <class T>
class PerProcess {
 public:
  T& operator*() {
    const pid_t self = ::getpid();
    Node* node = node_.load(std::memory_order_acquire);
    if (node != nullptr && node->process == self) return node->value;
    auto* const fresh = new Node{self, node, {}};
    // Leak checkers find the parent's by the child's.
    if (node_.compare_exchange_strong(node, fresh, std::memory_order_acq_rel)) return fresh->value;
    delete fresh;
    return node->value;
  }
  T* operator->() { return &**this; }

 private:
  struct Node {
    pid_t process;
    Node* parents;
    T value;
  };
  std::atomic<Node*> node_{nullptr};
};

}  // namespace muster
