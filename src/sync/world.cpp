// SPDX-License-Identifier: Apache-2.0
// world(): finds out how this process was started.

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <mutex>

#include "muster/sync_group.hpp"
#include "src/os/process.hpp"
#include "src/sync/distant_world.hpp"
#include "src/sync/settings.hpp"

namespace muster {
namespace {

int number_of(const char* name, const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 0)
    throw Error(ErrorKind::argument,
                fmt::format("the environment's {} is '{}': it must be a number from 0 on", name, text));
  return value;
}

int required_number(const char* name) {
  const auto text = os::environment(name);
  if (!text)
    throw Error(ErrorKind::argument,
                fmt::format("the environment has RANK or WORLD_SIZE but not {}: set all of them or none", name));
  return number_of(name, *text);
}

std::string text_of(const char* name) {
  return os::environment(name).value_or("");
}

sync::DistantWorldMaker& distant_maker() {
  static sync::DistantWorldMaker maker;
  return maker;
}

std::shared_ptr<SyncGroup> world_of_environment() {
  if (!os::environment("RANK") && !os::environment("WORLD_SIZE")) return single_group();
  const int rank = required_number("RANK");
  const int size = required_number("WORLD_SIZE");
  if (size < 1 || rank >= size)
    throw Error(ErrorKind::argument,
                fmt::format("the environment says rank {} in a world of {} ranks, which cannot be", rank, size));
  const auto local = os::environment("LOCAL_WORLD_SIZE");
  const bool all_here = local && number_of("LOCAL_WORLD_SIZE", *local) == size;
  const auto workspace = os::environment("MUSTER_WORKSPACE");
  if (local && !all_here && (!workspace || !distant_maker()))
    throw Error(
        ErrorKind::unsupported,
        fmt::format(
            "{} of {} ranks are on this host (LOCAL_WORLD_SIZE, WORLD_SIZE): ranks of several hosts need a directory "
            "that all of them see, named by MUSTER_WORKSPACE, or a group that reaches them, set by set_world()",
            *local, size));
  if (size == 1) return single_group();
  std::string key;
  if (const auto job = os::environment("MUSTER_JOB")) {
    key = "job " + *job;
  } else if (os::environment("MASTER_ADDR") && os::environment("MASTER_PORT")) {
    // torchrun's own port is another program's: its number only tells jobs apart.
    key = fmt::format("torchrun {} {} {} {}", text_of("MASTER_ADDR"), text_of("MASTER_PORT"),
                      text_of("TORCHELASTIC_RUN_ID"), text_of("TORCHELASTIC_RESTART_COUNT"));
  } else {
    throw Error(ErrorKind::argument,
                "the environment has RANK and WORLD_SIZE but nothing that tells this job from others: start the ranks "
                "by `muster run` "
                "or torchrun, or set MUSTER_JOB to the same random word on all of them");
  }
  // Who names a workspace and does not say that all ranks are here has ranks elsewhere.
  if (workspace && !all_here && distant_maker())
    return distant_maker()({.directory = *workspace, .key = key, .rank = rank, .size = size});
  return local_group({.key = key, .rank = rank, .size = size, .timeout = {}});
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

void set_distant_world_maker(DistantWorldMaker maker) {
  distant_maker() = std::move(maker);
}

std::chrono::milliseconds default_timeout() {
  const auto text = os::environment("MUSTER_TIMEOUT");
  if (!text) return std::chrono::minutes(10);
  double seconds = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), seconds);
  if (error != std::errc{} || end != text->data() + text->size() || !std::isfinite(seconds) || seconds <= 0 ||
      seconds > 1e9)
    throw Error(ErrorKind::argument, fmt::format("MUSTER_TIMEOUT is '{}': it must be a number of seconds", *text));
  return std::chrono::milliseconds(std::max<std::int64_t>(1, std::llround(seconds * 1000)));
}

}  // namespace sync
}  // namespace muster
