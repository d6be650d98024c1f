// SPDX-License-Identifier: Apache-2.0
// The public call that makes a file group, and world()'s way to it.

#include <fmt/core.h>

#include "muster/workspace.hpp"
#include "src/sync/distant_world.hpp"
#include "src/sync/settings.hpp"
#include "src/workspace/file_group.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/meeting.hpp"
#include "src/workspace/workspace_directory.hpp"

namespace muster {
namespace {

using std::chrono::milliseconds;

void check(const FileGroupOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    throw Error(ErrorKind::argument, fmt::format("a file group cannot have rank {} of {}", options.rank, options.size));
  if (options.heartbeat < milliseconds(1))
    throw Error(ErrorKind::argument, "a file group's heartbeat must be at least a millisecond");
  if (options.lost_after < 3 * options.heartbeat)
    throw Error(ErrorKind::argument, "a file group's lost_after must be three heartbeats at least: one may come late");
  if (options.timeout && *options.timeout <= milliseconds::zero())
    throw Error(ErrorKind::argument, "a file group's timeout must be longer than nothing");
}

// Made known when the library is loaded.
[[maybe_unused]] const bool is_registered = [] {
  sync::set_distant_world_maker([](const sync::DistantWorld& world) {
    return file_group(
        {.directory = world.directory, .key = world.key, .rank = world.rank, .size = world.size, .timeout = {}});
  });
  return true;
}();

}  // namespace

std::shared_ptr<SyncGroup> file_group(const FileGroupOptions& options) {
  check(options);
  const milliseconds timeout = sync::timeout_of(options.timeout, sync::default_timeout());
  const workspace::WorkspaceDirectory directory = workspace::prepare_workspace(options.directory);
  if (options.rank == 0) workspace::sweep_dead(directory.path);
  workspace::Meeting meeting(directory, options, timeout);
  workspace::Meeting::Job job = meeting.attend();
  auto heart = std::make_shared<workspace::Heart>(std::make_shared<workspace::GroupDirectory>(
      workspace::GroupDirectory::Options{.workspace = directory.path,
                                         .path = job.directory,
                                         .rank = options.rank,
                                         .heartbeat = options.heartbeat,
                                         .lost_after = options.lost_after,
                                         .is_network = directory.is_network},
      std::move(job.members)));
  auto group = std::make_shared<workspace::FileGroup>(std::move(heart), nullptr, 0, job.nonce, timeout);
  // Rank 0's list of the ranks stays until all have read it.
  group->barrier({.timeout = timeout, .stop = {}, .phase = "meeting"});
  return group;
}

}  // namespace muster
