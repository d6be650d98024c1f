// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes done so far, counted by any thread, told to a callback.

#include <chrono>
#include <cstdint>
#include <mutex>

#include "muster/progress.hpp"

namespace muster {

class ProgressCounter {
 public:
  /// `callback` must live as long; it may be empty.
  ProgressCounter(const ProgressCallback& callback, std::uint64_t total)
      : callback_(callback), progress_{0, total, 0}, begin_(std::chrono::steady_clock::now()) {}
  /// One call of the callback at a time. Throws what the callback throws.
  void add(std::uint64_t bytes) {
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
};

}  // namespace muster
