// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pulse: what the ranks of a group tell each other beside rounds and messages, as one rank sees it; and how a rank sees
// that another has ended. What a watchdog looks at, whatever the group is made of.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"
#include "src/sync/group.hpp"
#include "src/sync/region.hpp"

namespace muster::sync {

/// What a rank is in that is in no call of the group.
inline constexpr const char* between_calls = "its own work";

class Pulse {
 public:
  virtual ~Pulse() = default;
  /// The group was destroyed there.
  [[nodiscard]] virtual bool has_left(int rank) const = 0;
  /// Changes as the rank gets on.
  [[nodiscard]] virtual std::uint64_t progress_of(int rank) const = 0;
  /// The rank that this one waits for in a companion group, and 1; 0: for none.
  [[nodiscard]] virtual std::uint32_t awaited_by(int rank) const = 0;
  virtual void tell_awaited(int self, std::uint32_t awaited) noexcept = 0;
  /// What the rank is in.
  [[nodiscard]] virtual std::string phase(int rank) const = 0;

  /// Makes `cause` the group's failure unless it has one; wakes every waiting rank.
  virtual void poison(const Error& cause) noexcept = 0;
  [[nodiscard]] virtual std::optional<Error> failure() const = 0;
  [[nodiscard]] virtual bool has_failure() const noexcept = 0;
};

/// Tells the others what this rank is in as long as it lives, for their messages. tell(words).
template <class Tell>
class InPhase {
 public:
  InPhase(Tell tell, const char* phase) : tell_(std::move(tell)) { tell_(phase); }
  ~InPhase() { tell_(between_calls); }
  InPhase& operator=(InPhase&&) = delete;

 private:
  Tell tell_;
};

/// Who the ranks are and how to see that one has ended. The same for a group and its duplicates.
struct Peers {
  std::vector<RankInfo> ranks;
  std::vector<std::shared_ptr<const os::Fd>> pidfds;  // of each rank; null if there is no such thing
  // Of ranks that share memory: each one's, and rank 0's for what groups are made of, which is apart because it stays
  // as long as the groups do, whoever is dead.
  std::vector<std::shared_ptr<Region>> regions;
  std::shared_ptr<Region> structure;

  virtual ~Peers() = default;
  Peers& operator=(Peers&&) = delete;
  /// What became of a rank that is no more ("died"); none if it may live. Never waits.
  [[nodiscard]] virtual std::optional<std::string> end_of(int rank) const {
    return has_ended(rank) ? std::optional<std::string>("died") : std::nullopt;
  }
  /// Of a rank of this host.
  [[nodiscard]] bool has_ended(int rank) const noexcept {
    const auto& pidfd = pidfds[static_cast<std::size_t>(rank)];
    return pidfd && *pidfd && os::has_exited(*pidfd);
  }
  /// "alive", "dead", "stopped": for messages.
  [[nodiscard]] virtual std::string state_of(int rank) const {
    if (end_of(rank)) return "dead";
    const bool is_stopped = os::process_state(ranks[static_cast<std::size_t>(rank)].pid) == os::ProcessState::stopped;
    return is_stopped ? "stopped" : "alive";
  }
};

}  // namespace muster::sync
