// SPDX-License-Identifier: Apache-2.0
#pragma once
// What MpiGroup's waits are made of.

#include <fmt/core.h>

#include "src/mpi/mpi_group.hpp"
#include "src/sync/failing.hpp"

namespace muster::mpi {

/// A call of the group: what this rank is in, for those who ask. Throws where the thread may not call MPI.
class MpiGroup::Phase {
 public:
  Phase(MpiGroup& group, const char* phase) : group_(group) {
    if (group.has_ended_.load()) throw *group.failure();
    if (group.has_other_hosts()) group.family_->enter();
    before_ = group.phase_.exchange(phase);
  }
  ~Phase() { group_.phase_.store(before_); }
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

 private:
  MpiGroup& group_;
  const char* before_ = nullptr;
};

template <class Call>
auto MpiGroup::locally(int on, const Call& call) {
  struct Awaiting {
    std::atomic<int>& place;
    int before;
    ~Awaiting() { place.store(before); }
  } const awaiting{waits_for_, waits_for_.exchange(on)};
  try {
    return call();
  } catch (const Error&) {
    // An argument error leaves the local group as it was.
    if (!local().failure()) throw;
    pass_on_local_failure();
    throw *failure();
  }
}

/// Runs what MPI does between this rank and `on`, who waits for it: what MPI fails with fails the group.
template <class Call>
auto MpiGroup::or_fail(int on, const WaitOptions& options, const Call& call) {
  try {
    return call();
  } catch (const Error& error) {
    if (known_failure()) {
      pass_on_local_failure();
      throw *failure();
    }
    const RankInfo& peer = info(on);
    sync::fail(*this, Error(error.kind() == ErrorKind::io ? ErrorKind::peer_lost : error.kind(),
                            fmt::format("in '{}' of rank {} with rank {} (host {}, pid {}): {}", options.phase, rank(),
                                        on, peer.host, peer.pid, error.what()),
                            {.rank = on, .pid = peer.pid, .host = peer.host}));
  }
}

}  // namespace muster::mpi
