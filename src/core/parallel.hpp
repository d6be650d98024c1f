// SPDX-License-Identifier: Apache-2.0
#pragma once
// Long work: independent pieces of it over a few threads, and how far it has come.

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

/// Calls work(index, worker) for each index below `count`, each once, in about ascending order, on up to `workers`
/// threads (the caller's is one of them). The first exception is thrown again when all have stopped; what was not begun
/// then stays undone.
void parallel_for(std::size_t count, std::size_t workers, const std::function<void(std::size_t, std::size_t)>& work);

/// Threads worth having for copying and writing on this machine, shared by `processes` of them.
std::size_t copy_workers(int processes = 1) noexcept;

// Bytes done so far, counted by any thread, told to a callback; and where long work ends if it is to stop.

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
