// SPDX-License-Identifier: Apache-2.0
// mpi_group().

#include "muster/mpi.hpp"

#include "src/mpi/ending.hpp"
#include "src/mpi/mpi_group.hpp"
#include "src/sync/settings.hpp"

namespace muster {
namespace {

mpi::MpiThreads threads_of_mpi() {
  int level = MPI_THREAD_SINGLE;
  mpi::check(MPI_Query_thread(&level), "asking for the level of thread support");
  if (level == MPI_THREAD_MULTIPLE) return mpi::MpiThreads::all;
  if (level == MPI_THREAD_SERIALIZED) return mpi::MpiThreads::each;
  int is_main = 0;
  mpi::check(MPI_Is_thread_main(&is_main), "asking for the main thread");
  if (is_main == 0)
    throw Error(ErrorKind::unsupported,
                "mpi_group: MPI was initialised for calls of its main thread only, and this is another one: initialise "
                "it with MPI_THREAD_MULTIPLE, or make the group there");
  return mpi::MpiThreads::one;
}

std::map<int, std::shared_ptr<const PeerLiveness>> neighbours_of(const mpi::Hosts& hosts, int self) {
  std::map<int, std::shared_ptr<const PeerLiveness>> neighbours;
  for (const int rank : hosts.members[static_cast<std::size_t>(hosts.mine)])
    if (rank != self) neighbours.emplace(rank, hosts.local->liveness(hosts.place_of[static_cast<std::size_t>(rank)]));
  return neighbours;
}

}  // namespace

std::shared_ptr<SyncGroup> mpi_group(MPI_Comm comm, const MpiGroupOptions& options) {
  if (mpi::must_rest()) throw Error(ErrorKind::unsupported, std::string("mpi_group: ") + mpi::resting_words);
  if (!mpi::is_running())
    throw Error(ErrorKind::argument,
                "mpi_group: MPI is not initialised here, or has ended: call MPI_Init_thread before");
  const mpi::MpiThreads threads = threads_of_mpi();
  const std::chrono::milliseconds timeout = sync::timeout_of(options.timeout, sync::default_timeout());
  mpi::advance_endings();
  const auto family = std::make_shared<mpi::Family>(mpi::Comm::duplicate(comm, timeout), threads, timeout);
  mpi::keep(family);
  try {
    mpi::Met met = mpi::meet(family->comm(), timeout);
    family->introduce(met.ranks, neighbours_of(met.hosts, family->rank()));
    if (met.hosts.members.size() > 1) family->spans_hosts();
    auto group = std::make_shared<mpi::MpiGroup>(family, 0, std::move(met), timeout);
    group->barrier({.timeout = {}, .stop = {}, .phase = "mpi_group"});
    return group;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::version) family->has_failed();
    family->retire();
    throw;
  }
}

}  // namespace muster
