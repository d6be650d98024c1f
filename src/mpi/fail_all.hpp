// SPDX-License-Identifier: Apache-2.0
#pragma once
// While pieces are under way other ranks wait for each of them: what one rank fails with then is the group's failure.

#include <fmt/format.h>

#include <new>

#include "muster/error.hpp"
#include "src/gather/opening.hpp"
#include "src/mpi/mpi_group.hpp"

namespace muster::mpi {

/// Runs work that other ranks wait for.
template <class Work>
void or_fail_all(MpiGroup& group, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    if (!group.known_failure()) group.poison(error);
    throw group.failure().value_or(error);
  } catch (const std::bad_alloc&) {
    gather::fail_all(group, Error(ErrorKind::no_space, "out of memory while tensors were under way"));
  }
}

/// The dead of this rank's own host are seen at once; those of other hosts are the group's waits' to find.
inline void throw_if_dead(const MpiGroup& group, int other) {
  if (!group.shares_memory(other) || !group.liveness(other)->is_dead()) return;
  const RankInfo& info = group.info(other);
  throw Error(ErrorKind::peer_lost,
              fmt::format("rank {} (host {}, pid {}) died while tensors were under way between it and rank {}", other,
                          info.host, info.pid, group.rank()),
              {.rank = other, .pid = info.pid, .host = info.host});
}

/// Whether MPI has finished with it; what MPI says instead is that the other rank is lost.
inline bool has_finished(Pending& pending, const MpiGroup& group, int other) {
  try {
    return pending.test();
  } catch (const Error& error) {
    const RankInfo& info = group.info(other);
    throw Error(ErrorKind::peer_lost,
                fmt::format("the connection to rank {} (host {}, pid {}) broke while tensors were under way: {}", other,
                            info.host, info.pid, error.what()),
                {.rank = other, .pid = info.pid, .host = info.host});
  }
}

}  // namespace muster::mpi
