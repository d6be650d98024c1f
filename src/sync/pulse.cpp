// SPDX-License-Identifier: Apache-2.0
#include "src/sync/pulse.hpp"

#include "src/os/process.hpp"

namespace muster::sync {

bool Peers::has_ended(int rank) const noexcept {
  const auto& pidfd = pidfds[static_cast<std::size_t>(rank)];
  return pidfd && *pidfd && os::has_exited(*pidfd);
}

std::optional<std::string> Peers::end_of(int rank) const {
  if (has_ended(rank)) return "died";
  return std::nullopt;
}

std::string Peers::state_of(int rank) const {
  if (end_of(rank)) return "dead";
  const bool is_stopped = os::process_state(ranks[static_cast<std::size_t>(rank)].pid) == os::ProcessState::stopped;
  return is_stopped ? "stopped" : "alive";
}

}  // namespace muster::sync
