// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a group stands on this rank: whether it gets on, and what it has failed with. A companion asks this of its group,
// which may be gone before it, and which owns it where it has streams: so it holds no more of it than this.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "muster/sync_group.hpp"
#include "src/mpi/first_cause.hpp"

namespace muster::mpi {

/// Any thread.
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
