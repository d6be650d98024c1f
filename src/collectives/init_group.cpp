// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/init_group.hpp"

#include <fmt/core.h>

#include <cstdint>

#include "muster/tcp.hpp"
#include "src/collectives/device_backend.hpp"

namespace muster::collectives {
namespace {

enum class Way : std::uint8_t { shm, tcp, mpi };

Way way_of(std::string_view name) {
  if (name == "shm") return Way::shm;
  if (name == "tcp" || name == "gloo") return Way::tcp;
  if (name == "mpi") return Way::mpi;
  // Whatever the backend, tensors on devices go by NCCL.
  if (name == "nccl" && has_device_backend()) return Way::tcp;
  if (name == "nccl")
    throw Error(ErrorKind::unsupported,
                "the backend 'nccl' moves tensors on devices, which this program does not know: link libmuster-cuda "
                "(pkg-config muster-cuda)");
  throw Error(ErrorKind::argument, fmt::format("there is no backend '{}': shm, tcp, gloo, mpi or nccl", name));
}

/// env://.
std::shared_ptr<SyncGroup> group_of_environment(const dist::InitOptions& options) {
  auto group = muster::world();
  if ((options.rank != -1 && options.rank != group->rank()) ||
      (options.world_size != -1 && options.world_size != group->size()))
    throw Error(ErrorKind::argument,
                fmt::format("env:// has this process as rank {} of {}, and the call as rank {} of {}", group->rank(),
                            group->size(), options.rank, options.world_size));
  return group;
}

std::shared_ptr<SyncGroup> group_at(Way way, const dist::InitOptions& options) {
  const std::string& method = options.init_method;
  check_init_method(method);
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
    throw Error(ErrorKind::argument, fmt::format("{} needs a rank and a world_size, and cannot have rank {} of {}",
                                                 method, options.rank, options.world_size));
  if (way == Way::mpi)
    throw Error(ErrorKind::argument, fmt::format("the backend 'mpi' finds its ranks itself: env://, not {}", method));
  if (way == Way::shm)
    return local_group({.key = method + ' ' + options.group_name,
                        .rank = options.rank,
                        .size = options.world_size,
                        .timeout = options.timeout});
  return tcp_group({.address = method,
                    .rank = options.rank,
                    .size = options.world_size,
                    .timeout = options.timeout,
                    .key = options.group_name});
}

}  // namespace

void check_init_method(const std::string& method) {
  if (method != "env://" && !method.starts_with("tcp://") && !method.starts_with("file://"))
    throw Error(ErrorKind::argument,
                fmt::format("'{}' is no init_method: env://, tcp://HOST:PORT or file:///PATH", method));
}

void check_backend_name(std::string_view name) {
  way_of(name);
}

void check_backend(std::string_view name, const SyncGroup& group) {
  const Way way = way_of(name);
  if (way == Way::mpi && group.kind() != "mpi")
    throw Error(ErrorKind::unsupported,
                fmt::format("the backend 'mpi' needs a job that MPI has started (mpiexec), and this one is of the kind "
                            "'{}'",
                            group.kind()));
  if (way != Way::shm) return;
  for (int rank = 0; rank < group.size(); ++rank)
    if (group.host_of(rank) != group.host_of(0))
      throw Error(ErrorKind::unsupported,
                  fmt::format("the backend 'shm' is for ranks of one host, and rank {} is on another one ({}): 'tcp' "
                              "or 'mpi'",
                              group.info(rank).rank, group.info(rank).host));
}

std::shared_ptr<SyncGroup> init_group(std::string_view name, const dist::InitOptions& options) {
  const Way way = way_of(name);
  auto group = options.init_method == "env://" ? group_of_environment(options) : group_at(way, options);
  if (options.timeout) group->set_timeout(*options.timeout);
  check_backend(name, *group);
  return group;
}

}  // namespace muster::collectives
