// SPDX-License-Identifier: Apache-2.0
// duplicate() and companion() that fail on one rank, at every step: all ranks have the cause at once, and the group
// goes on.

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "doctest/doctest.h"
#include "src/os/fault.hpp"
#include "tests/support/forked_ranks.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

// How many calls come through before one fails; none does below zero.
thread_local int left = -1;

bool fails_now() {
  return left >= 0 && left-- == 0;
}

template <int error>
int failing_call(std::string_view call, std::string_view) {
  for (const char* name : {"socket", "accept", "recvmsg", "memfd_create", "ftruncate", "mmap"})
    if (call == name) return fails_now() ? error : 0;
  return 0;
}

bool allocations_fail = false;

/// Takes all descriptors but `left`, and gives them back.
class FewDescriptors {
 public:
  FewDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit tight{128, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &tight);
    std::vector<int> all;
    for (int taken = 0; (taken = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) all.push_back(taken);
    for (int spare = left; spare > 0; --spare) {
      ::close(all.back());
      all.pop_back();
    }
    left = -1;
    taken_ = std::move(all);
  }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;
  ~FewDescriptors() {
    for (const int descriptor : taken_) ::close(descriptor);
    ::setrlimit(RLIMIT_NOFILE, &before_);
  }

 private:
  rlimit before_{};
  std::vector<int> taken_;
};

struct Failure {
  std::string name;
  const char* words;
  /// Calls `work` so that it fails after `left` steps.
  void (*around)(const std::function<void()>& work);
};

template <int error>
void with_failing_call(const std::function<void()>& work) {
  os::set_fault_hook(&failing_call<error>);
  try {
    work();
  } catch (...) {
    os::set_fault_hook(nullptr);
    throw;
  }
  os::set_fault_hook(nullptr);
}

const Failure failures[] = {
    {"no descriptor is left", "(EMFILE)",
     [](const std::function<void()>& work) {
       const FewDescriptors few;
       work();
     }},
    {"the machine has no descriptor", "(ENFILE)", with_failing_call<ENFILE>},
    {"the kernel has no memory", "(ENOMEM)", with_failing_call<ENOMEM>},
    {"an allocation fails", "out of memory",
     [](const std::function<void()>& work) {
       allocations_fail = true;
       try {
         work();
       } catch (...) {
         allocations_fail = false;
         throw;
       }
       allocations_fail = false;
     }},
};

}  // namespace

void* operator new(std::size_t bytes) {
  if (allocations_fail && fails_now()) throw std::bad_alloc();
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

TEST_CASE("a duplicate that fails on one rank, at any step, fails on all at once, and the group goes on") {
  constexpr int size = 3;
  for (const Failure& failure : failures)
    for (int victim = 0; victim < size; ++victim) {
      CAPTURE(failure.name);
      CAPTURE(victim);
      run_ranks(size, [&](SyncGroup& group) {
        int failed = 0;
        const auto fails_after = [&](int steps, bool tied) {
          std::shared_ptr<SyncGroup> copy;
          const auto make = [&] { copy = tied ? group.companion() : group.duplicate(); };
          const auto begin = std::chrono::steady_clock::now();
          try {
            if (group.rank() == victim) {
              left = steps;
              failure.around(make);
            } else {
              make();
            }
          } catch (const Error& error) {
            left = -1;
            const std::string words = error.what();
            if (error.rank() != victim || words.find("rank " + std::to_string(victim)) == std::string::npos ||
                words.find(failure.words) == std::string::npos)
              throw RankFailure("after " + std::to_string(steps) + " steps: " + words);
            RANK_CHECK(std::chrono::steady_clock::now() - begin < 2s);
          }
          left = -1;
          group.barrier();
          if (copy) copy->barrier();
          return copy == nullptr;
        };
        for (const bool tied : {false, true})
          for (int steps = 0; fails_after(steps, tied); ++steps) ++failed;
        RANK_CHECK(failed > 2);
        group.duplicate()->barrier();
      });
    }
}
