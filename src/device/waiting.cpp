// SPDX-License-Identifier: Apache-2.0
#include "src/device/waiting.hpp"
#include "src/sync/settings.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <thread>

namespace muster::cuda {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

}  // namespace

void wait_for_device(SyncGroup& group, const std::function<bool()>& done, const std::string& what,
                     const WaitOptions& options, std::span<const int> on) {
  const Clock::time_point begin = Clock::now();
  const auto timeout = sync::timeout_of(options.timeout, group.timeout());
  // The group's own deadline is about other ranks; a device that hangs has none.
  const auto is_done = [&] {
    if (done()) return true;
    if (Clock::now() - begin < timeout) return false;
    const RankInfo& self = group.info(group.rank());
    const Error cause(
        ErrorKind::timeout,
        fmt::format("rank {} (host {}, pid {}) waited {:.1f} s in '{}' for {}: look what else runs there, "
                    "or raise the timeout (MUSTER_TIMEOUT, seconds)",
                    self.rank, self.host, self.pid, std::chrono::duration<double>(timeout).count(), options.phase,
                    what),
        {.rank = self.rank, .pid = self.pid, .host = self.host});
    group.poison(cause);
    throw group.failure().value_or(cause);
  };
  auto pause = 2us;
  group.wait_until(
      is_done,
      [&](std::chrono::nanoseconds longest) {
        // A copy of some MiB takes about a millisecond: short at first, so that small tensors do not wait.
        std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(longest, pause));
        pause = std::min<std::chrono::microseconds>(2 * pause, 200us);
      },
      on, options);
}

}  // namespace muster::cuda
