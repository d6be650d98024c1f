// SPDX-License-Identifier: Apache-2.0
#pragma once
// Thread: a thread of the library that ends with its owner.

#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "muster/error.hpp"
#include "src/os/process.hpp"

namespace muster::os {

/// A thread that ends with its owner: the destructor requests it to stop, and joins it. In a forked child the thread
/// does not exist, so the destructor and join() return at once.
class Thread {
 public:
  Thread() = default;
  /// Starts the thread. If the system cannot create one, throws Error(out_of_space) with the remedy; the message
  /// includes `purpose`.
  template <class Run>
  Thread(const char* purpose, Run&& run) try : thread_(std::make_unique<std::jthread>(std::forward<Run>(run))) {
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::out_of_space, std::string("thread for ") + purpose + ": starting: " + error.what() +
                                             ". Raise the limit of processes (ulimit -u)");
  }
  Thread(Thread&&) noexcept = default;
  Thread& operator=(Thread&& other) noexcept {
    drop_if_forked();
    thread_ = std::move(other.thread_);
    process_ = other.process_;
    return *this;
  }
  ~Thread() { drop_if_forked(); }

  [[nodiscard]] bool is_started() const noexcept { return thread_ != nullptr; }
  [[nodiscard]] bool is_of_other_process() const noexcept { return process_id() != process_; }
  /// Returns whether the caller runs on this thread.
  [[nodiscard]] bool is_this() const noexcept { return thread_ && thread_->get_id() == std::this_thread::get_id(); }
  void join() {
    drop_if_forked();
    if (thread_) thread_->join();
    thread_ = nullptr;
  }
  /// Lets the thread run without an owner.
  void detach() {
    thread_->detach();
    thread_ = nullptr;
  }

 private:
  void drop_if_forked() noexcept {
    if (is_of_other_process()) (void)thread_.release();
  }

  std::unique_ptr<std::jthread> thread_;
  std::int64_t process_ = process_id();
};

}  // namespace muster::os
