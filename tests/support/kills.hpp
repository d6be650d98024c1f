// SPDX-License-Identifier: Apache-2.0
#pragma once
// Kills ranks, and checks what the other ranks report.

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "muster/error.hpp"
#include "tests/support/forked_ranks.hpp"

namespace muster::test {

/// Kills or stops (SIGSTOP) this process after `delay`, from a thread. A kill when the kernel first touches a certain
/// byte would be more exact, but this is portable.
inline void kill_self_after(std::chrono::microseconds delay, int signal = SIGKILL) {
  std::thread([delay, signal] {
    std::this_thread::sleep_for(delay);
    ::kill(::getpid(), signal);
  }).detach();
}

/// Runs `body` in the ranks of one group. One of them, `victim`, kills itself (SIGKILL) or stops (SIGSTOP). The others
/// notice a stopped rank only at their deadline, which is short. Returns how each rank ended.
inline std::vector<Ended> try_losing(int victim, int signal, int count, const std::function<void(Group&)>& body) {
  const std::chrono::seconds timeout(signal == SIGKILL ? 20 : under_sanitizer ? 6 : 3);
  const GroupOf group(count);
  Ranks ranks(count, [&](int rank) { body(*group.join(rank, timeout)); });
  return ranks.wait_and_kill(victim, std::chrono::seconds(60));
}

/// For use in a surviving rank. The error must name the victim, and must arrive within `within`.
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
