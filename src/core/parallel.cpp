// SPDX-License-Identifier: Apache-2.0
#include "src/core/parallel.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "src/os/process.hpp"

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
  std::vector<std::thread> threads;
  for (std::size_t worker = 1; worker < std::min(workers, count); ++worker) {
    try {
      threads.emplace_back(loop, worker);
    } catch (const std::system_error&) {
      break;  // fewer threads do the same work
    }
  }
  loop(0);
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

std::size_t copy_workers(int processes) noexcept {
  // Four threads saturate a disk and come near the memory of most machines.
  return static_cast<std::size_t>(std::clamp(os::usable_cores() / std::max(processes, 1), 1, 4));
}

}  // namespace muster
