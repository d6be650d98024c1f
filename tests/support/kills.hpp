// SPDX-License-Identifier: Apache-2.0
#pragma once
// Kills ranks, and checks what the other ranks report.

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include "muster/error.hpp"
#include "tests/support/forked_ranks.hpp"

namespace muster::test {

/// Kills this process after `delay`, from a thread. A kill when the kernel first touches a certain byte would be more
/// exact, but this is portable.
inline void kill_self_after(std::chrono::microseconds delay) {
  std::thread([delay] {
    std::this_thread::sleep_for(delay);
    ::kill(::getpid(), SIGKILL);
  }).detach();
}

/// Called in a surviving rank: the error must name the victim, and must arrive within `within`.
inline void check_named(const Error& error, std::chrono::steady_clock::time_point since, int victim, pid_t pid,
                        std::chrono::milliseconds within) {
  const std::string words = error.what();
  const bool is_named = error.kind() == ErrorKind::peer_lost && error.rank() == victim &&
                        words.find("rank " + std::to_string(victim)) != std::string::npos &&
                        words.find("pid " + std::to_string(pid)) != std::string::npos;
  if (!is_named)
    throw RankFailure("rank " + std::to_string(victim) + " was killed, and this names another cause: " + words);
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - since);
  if (took >= within) throw RankFailure("it took " + std::to_string(took.count()) + " ms to hear this: " + words);
}

}  // namespace muster::test
