// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes done so far, counted by any thread, told to a callback; and where long work ends if it is to stop.

#include <chrono>
#include <cstdint>
#include <mutex>
#include <stop_token>
#include <utility>

#include "muster/error.hpp"
#include "muster/progress.hpp"

namespace muster {

class ProgressCounter {
 public:
  /// `callback` must live as long; it may be empty.
  ProgressCounter(const ProgressCallback& callback, std::uint64_t total, std::stop_token stop = {})
      : callback_(callback), progress_{0, total, 0}, begin_(std::chrono::steady_clock::now()), stop_(std::move(stop)) {}
  /// One call of the callback at a time. Throws what the callback throws; Error(cancelled) after a stop request.
  void add(std::uint64_t bytes) {
    if (stop_.stop_requested()) throw Error(ErrorKind::cancelled, "stopped by request");
    if (!callback_) return;
    const std::lock_guard lock(mutex_);
    progress_.bytes += bytes;
    progress_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    callback_(progress_);
  }

 private:
  const ProgressCallback& callback_;
  std::mutex mutex_;
  Progress progress_;
  std::chrono::steady_clock::time_point begin_;
  std::stop_token stop_;
};

}  // namespace muster
