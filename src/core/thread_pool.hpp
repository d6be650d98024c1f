// SPDX-License-Identifier: Apache-2.0
#pragma once
// Long work: independent pieces that run on a few threads, and progress reports.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stop_token>
#include <utility>

#include "muster/error.hpp"
#include "muster/progress.hpp"

namespace muster {

/// Calls work(index, worker) once for each index below `count`, in roughly ascending order, on up to `workers` threads
/// including the caller's. If calls throw, no new calls begin, and the first exception is rethrown when all threads
/// have stopped.
void parallel_for(std::size_t count, std::size_t workers, const std::function<void(std::size_t, std::size_t)>& work);

/// Returns how many threads are useful for copying and writing on this machine if `processes` processes share it.
std::size_t copy_workers(int processes = 1) noexcept;

// Counts the bytes that any thread has completed and reports them to a callback. Also ends the work if a stop is
// requested.

class ProgressCounter {
 public:
  /// `callback` must outlive this object; it may be empty.
  ProgressCounter(const ProgressCallback& callback, std::uint64_t total, std::stop_token stop = {})
      : callback_(callback), progress_{0, total, 0}, begin_(std::chrono::steady_clock::now()), stop_(std::move(stop)) {}
  /// Calls the callback, one call at a time. Throws exceptions of the callback, and Error(cancelled) after a stop
  /// request.
  void add(std::uint64_t bytes) {
    if (stop_.stop_requested()) throw Error(ErrorKind::cancelled, "operation: cancelled by a stop request");
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
