// SPDX-License-Identifier: Apache-2.0
// world(): finds out how this process was started.

#include <fmt/core.h>

#include <array>
#include <charconv>
#include <cmath>
#include <mutex>
#include <optional>

#include "muster/sync_group.hpp"
#include "muster/version.hpp"
#include "src/os/library.hpp"
#include "src/os/process.hpp"
#include "src/sync/registered.hpp"
#include "src/sync/settings.hpp"
#include "src/sync/start.hpp"

namespace muster::sync {
namespace {

std::optional<MpiSupport>& registered() {
  static std::optional<MpiSupport> support;
  return support;
}

}  // namespace

void set_mpi_support(MpiSupport support) {
  registered() = std::move(support);
}

const MpiSupport* mpi_support() {
  return registered() ? &*registered() : nullptr;
}

const MpiSupport& require_mpi() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (const MpiSupport* support = mpi_support()) return *support;
  const std::string name = fmt::format("libmuster-mpi.so.{}", version());
  // It registers itself while it is loaded.
  const os::LoadedLibrary library = os::load_library(name);
  if (const MpiSupport* support = mpi_support()) return *support;
  throw Error(ErrorKind::unsupported,
              fmt::format("ranks that MPI has started need {} and the MPI that it was built with: install them, the "
                          "first beside libmuster ({}), or make the group by muster::mpi_group() and set_world() ({})",
                          name, library.file, library.failure),
              {.path = library.file});
}

}  // namespace muster::sync

namespace muster {
namespace {

sync::WorldMaker& maker_by(sync::MeetBy by) {
  static std::array<sync::WorldMaker, 2> makers;
  return makers.at(static_cast<std::size_t>(by));
}

/// Ranks whose launcher has told them who they are, but has no way between them.
std::shared_ptr<SyncGroup> world_of_numbers(const sync::Start& start) {
  const auto workspace = os::environment("MUSTER_WORKSPACE");
  const sync::WorldMaker& maker = maker_by(workspace ? sync::MeetBy::files : sync::MeetBy::tcp);
  const std::string& place = workspace ? *workspace : start.meeting;
  const bool can_meet = maker && !place.empty();
  if (start.is_apart && !can_meet)
    throw Error(ErrorKind::unsupported,
                fmt::format("some of the {} ranks are not on this host ({}), and nothing says where they meet: set "
                            "MASTER_ADDR and MASTER_PORT to an address of rank 0's host, name a directory that all of "
                            "them see by MUSTER_WORKSPACE, start them with mpiexec, or set_world() a group of them",
                            start.size, start.said));
  if (start.size == 1) return single_group();
  if (start.key.empty())
    throw Error(ErrorKind::argument,
                "the environment has RANK and WORLD_SIZE but nothing that tells this job from others: start the ranks "
                "by `muster run`, torchrun or mpiexec, or set MUSTER_JOB to the same random word on all of them");
  // Who names a workspace and does not say that all ranks are here has ranks elsewhere.
  if (can_meet && !(workspace && start.is_here))
    return maker({.place = place, .key = start.key, .rank = start.rank, .size = start.size});
  return local_group({.key = start.key, .rank = start.rank, .size = start.size, .timeout = {}});
}

std::shared_ptr<SyncGroup> world_of_environment() {
  // A program that has initialised MPI knows better than the environment.
  const sync::MpiSupport* mpi = sync::mpi_support();
  if (mpi != nullptr && mpi->ranks() > 1) return mpi->make_world({.by = sync::StartedBy::mpi, .size = 0});
  const sync::Start start = sync::find_start(sync::own_surroundings());
  switch (start.by) {
    case sync::StartedBy::alone:
      return single_group();
    case sync::StartedBy::mpi:
      return sync::require_mpi().make_world(start);
    case sync::StartedBy::launcher:
    case sync::StartedBy::slurm:
      break;
  }
  return world_of_numbers(start);
}

struct World {
  std::mutex mutex;
  std::shared_ptr<SyncGroup> group;
};

World& the_world() {
  // Destroyed at exit, so that a rank that ends in order is seen to have left, not to have died.
  static World world;
  return world;
}

}  // namespace

std::shared_ptr<SyncGroup> world() {
  World& world = the_world();
  const std::lock_guard lock(world.mutex);
  if (!world.group) world.group = world_of_environment();
  return world.group;
}

void set_world(std::shared_ptr<SyncGroup> group) {
  World& world = the_world();
  const std::lock_guard lock(world.mutex);
  world.group = std::move(group);
}

namespace sync {

void set_world_maker(MeetBy by, WorldMaker maker) {
  maker_by(by) = std::move(maker);
}

std::chrono::milliseconds default_timeout() {
  const auto text = os::environment("MUSTER_TIMEOUT");
  if (!text) return std::chrono::minutes(10);
  double seconds = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), seconds);
  if (error != std::errc{} || end != text->data() + text->size() || !std::isfinite(seconds) || seconds <= 0 ||
      seconds > std::chrono::duration<double>(longest_timeout).count())
    throw Error(ErrorKind::argument, fmt::format("MUSTER_TIMEOUT is '{}': it must be a number of seconds", *text));
  return std::chrono::milliseconds(std::max<std::int64_t>(1, std::llround(seconds * 1000)));
}

}  // namespace sync
}  // namespace muster
