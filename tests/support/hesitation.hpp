// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes another rank slow at random moments.

#include <signal.h>

#include <chrono>
#include <random>
#include <stop_token>
#include <thread>

#include "muster/group.hpp"

namespace muster::test {

/// While this object exists, a thread of this process repeatedly stops another rank for up to 2 ms. It never stops a
/// rank of another host, whose pid may belong to another process here.
class Hesitation {
 public:
  Hesitation(const Group& group, int rank)
      : thread_([pid = static_cast<pid_t>(group.info(rank).pid),
                 is_here = group.info(rank).host == group.info(group.rank()).host](const std::stop_token& stop) {
          if (!is_here) return;
          std::mt19937 random(2026);
          const auto pause = [&](unsigned most) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
          };
          while (!stop.stop_requested()) {
            pause(1000);
            ::kill(pid, SIGSTOP);
            pause(2000);
            ::kill(pid, SIGCONT);
          }
        }) {}

 private:
  std::jthread thread_;
};

}  // namespace muster::test
