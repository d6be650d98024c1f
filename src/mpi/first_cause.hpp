// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which failure all ranks of a group throw where ranks of several hosts find one at about the same time: deadlines pass
// on all of them at once.
//
//  1. On one host the first is right: its words are in the local group's failure cell. Whoever put them there proposes
//     them to the other hosts. Who has heard of a failure proposes none any more.
//  2. Whoever knows of a failure listens for `settling` to what other hosts propose. That of the lowest host counts.
//  3. It goes into the local group's verdict cell, where the first stays: the ranks of a host throw what stands there.
//     Where the others do not tell all ranks of a host, they tell its leader: the rest leave it `lead` to decide.
//  4. Only then the local group is poisoned, which ends the waits of ranks that have not heard of it themselves.
// A companion does not settle: what fails it for good fails its parent as well, and the parent's words are thrown.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "muster/sync_group.hpp"

namespace muster::mpi {

/// What one rank knows of it. Any thread.
class FirstCause {
 public:
  using Clock = std::chrono::steady_clock;
  /// Long against a message's way to a rank that waits (those look every 20 ms), short against the deadlines.
  static constexpr std::chrono::milliseconds settling{200};
  static constexpr std::chrono::milliseconds lead{100};

  /// What a host has found; its first proposal stays.
  void propose(int host, const Error& cause);
  /// The proposal that counts as far as is known; none once it is decided.
  [[nodiscard]] std::optional<Error> best() const;
  /// Since when this rank knows of a failure; none where it does not.
  [[nodiscard]] std::optional<Clock::time_point> since() const;
  /// What is thrown from now on; the first stays.
  void decide(const Error& cause);
  [[nodiscard]] std::optional<Error> decided() const;

 private:
  mutable std::mutex mutex_;
  std::map<int, Error> proposals_;  // by host
  std::optional<Clock::time_point> since_;
  std::optional<Error> decided_;
};

/// How a group stands on this rank: whether it gets on, and what it has failed with. A companion asks this of its
/// group, which may be gone before it, and which owns it where it has streams: so it holds no more of it than this. Any
/// thread.
struct Standing {
  std::atomic<std::uint64_t> progress{0};
  FirstCause first_cause;
  std::weak_ptr<const SyncGroup> local;  ///< of the ranks of this host
  std::shared_ptr<Standing> parent;      ///< of a companion

  Standing(const std::shared_ptr<SyncGroup>& host, std::shared_ptr<Standing> group)
      : local(host), parent(std::move(group)) {}
  /// A failure that this rank knows of, which need not be the one that all come to throw. Never waits.
  [[nodiscard]] std::optional<Error> known_failure() const {
    if (auto cause = first_cause.decided()) return cause;
    if (auto cause = first_cause.best()) return cause;
    if (const auto host = local.lock())
      if (auto cause = host->failure()) return cause;
    return parent ? parent->known_failure() : std::nullopt;
  }
};

}  // namespace muster::mpi
