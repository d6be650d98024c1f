// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the exchanges of the MPI route (mpi_route.cpp) and its merges (mpi_merge.cpp) have in common.

#include <cstdint>
#include <memory>

#include "src/gather/route.hpp"
#include "src/mpi/flows.hpp"

namespace muster::mpi {

/// Whether what a sender has goes to the first rank by MPI: from other hosts, and where the route is forced from its
/// own, too.
bool goes_by_mpi(const gather::Call& call, const MpiGroup& group, int sender);

/// On the first rank, before round 1: what its pool has, and how far it may grow.
void offer_to_receive(const gather::Call& call, BufferPool& pool, gather::Record& record);

/// Begins what a sender sends before its pieces.
struct ParcelHead {
  std::uint64_t exchange = 0;  ///< Call::number: an earlier one, that failed, may have left a message behind
  std::uint64_t is_well = 0;   ///< else the sender cannot send, and round 2 says why
  std::uint64_t ring = 0;      ///< of a merge: the place of the ring that a sender of the first rank's host knows
};

std::unique_ptr<gather::Transfer> make_mpi_merge(const gather::Call& call, MpiGroup& group);

}  // namespace muster::mpi
