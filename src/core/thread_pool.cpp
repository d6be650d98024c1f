// SPDX-License-Identifier: Apache-2.0
#include "src/core/thread_pool.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <new>
#include <vector>

#include "src/os/process.hpp"
#include "src/os/thread.hpp"

namespace muster {

void parallel_for(std::size_t count, std::size_t workers, const std::function<void(std::size_t, std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr first;
  const auto loop = [&](std::size_t worker) {
    try {
      for (std::size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i, worker);
    } catch (...) {
      next.store(count);
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
  };
  {
    // The destructor joins the threads on every exit from the scope.
    std::vector<os::Thread> threads;
    try {
      for (std::size_t worker = 1; worker < std::min(workers, count); ++worker)
        threads.emplace_back("parallel work", [&loop, worker] { loop(worker); });
    } catch (const Error&) {           // NOLINT(bugprone-empty-catch): fewer threads do the same work
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): likewise
    }
    loop(0);
  }
  if (first) std::rethrow_exception(first);
}

std::size_t copy_workers(int processes) noexcept {
  // Four threads saturate a disk and nearly saturate the memory of most machines.
  return static_cast<std::size_t>(std::clamp(os::usable_cores() / std::max(processes, 1), 1, 4));
}

}  // namespace muster
