// SPDX-License-Identifier: Apache-2.0
#pragma once
// The measuring loop of the collectives, which is the same for the library and for every MPI. Calls run back to back.
// The input is rewritten before each call, because no program sends the same bytes twice. The time of the rewriting is
// subtracted.

#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>
#include <string>

namespace bench {

/// Returns initialised memory in huge pages, which is never freed.
inline char* buffer(std::size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 0, bytes);
  return static_cast<char*>(memory);
}

/// The loop of one rank. `meet` is a barrier. `largest` returns the largest of the numbers of all ranks.
struct Loop {
  int rank = 0;
  std::function<void()> meet;
  std::function<double(double)> largest;

  /// Runs for 400 ms, because idle virtual cores take some time to reach full speed.
  void warm_up() const {
    const auto begin = std::chrono::steady_clock::now();
    const auto is_over = [&] { return std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(400); };
    while (largest(is_over() ? 1 : 0) == 0) continue;
  }

  /// Returns the seconds per call of the slowest rank. The measurement takes about `seconds`.
  [[nodiscard]] double time(double seconds, char* written, std::size_t bytes, const std::function<void()>& call) const {
    const auto run = [&](int count, bool calls) {
      meet();
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < count; ++i) {
        std::memset(written, i & 1, bytes);
        if (calls) call();
      }
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      return largest(took.count() / count);
    };
    const double once = run(3, true);
    const double fit = seconds / (once > 1e-7 ? once : 1e-7);
    const int count = fit < 3 ? 3 : fit > 20000 ? 20000 : static_cast<int>(fit);
    const double all = run(count, true);
    return all - run(count, false);
  }

  void report(const std::string& operation, std::size_t bytes, double seconds) const {
    if (rank == 0) std::printf("%s %zu %.3f\n", operation.c_str(), bytes, seconds * 1e6);
    std::fflush(stdout);
  }
};

}  // namespace bench
