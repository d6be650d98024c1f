// SPDX-License-Identifier: Apache-2.0
#pragma once
// What stands before a descriptor that a sender of another host sends.

#include <cstdint>

namespace muster::mpi {

struct ParcelHead {
  std::uint64_t exchange = 0;  ///< Call::number: an earlier one, that failed, may have left a message behind
  std::uint64_t is_well = 0;   ///< else the sender cannot send, and round 2 says why
  std::uint64_t ring = 0;      ///< of a merge: the place of the ring that a sender of the first rank's host knows
};

}  // namespace muster::mpi
