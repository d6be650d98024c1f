// SPDX-License-Identifier: Apache-2.0
#include "muster/parallel_groups.hpp"

#include <fmt/core.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "muster/compat/dist.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/compat/dist.hpp"
#include "src/group/group.hpp"
#include "src/launch/job.hpp"

namespace muster {
namespace {

struct Made {
  ForkMutex mutex;
  std::unique_ptr<ParallelGroups> groups;
};
/// Destroyed at exit, like the process group.
Made& made() {
  static Made all;
  return all;
}

}  // namespace

int launch::ranks_of_model(int ranks, int model_parallelism, int pipeline_parallelism) {
  const std::int64_t part = std::int64_t{model_parallelism} * pipeline_parallelism;
  if (model_parallelism < 1 || pipeline_parallelism < 1 || ranks % part != 0)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("{} ranks cannot be split into models of {} ranks by {} stages", ranks, model_parallelism,
                            pipeline_parallelism));
  return static_cast<int>(part);
}

ParallelGroups::ParallelGroups(ProcessGroup& world, int model_parallelism, int pipeline_parallelism,
                               const std::string& model_backend, const std::string& pipeline_backend,
                               const std::string& data_backend) {
  const int part = launch::ranks_of_model(world.size(), model_parallelism, pipeline_parallelism);
  sizes_ = {model_parallelism, pipeline_parallelism, world.size() / part};
  const int rank = world.rank();
  place_ = {rank % sizes_.model, rank / sizes_.model % sizes_.pipeline, rank / part};
  struct Kind {
    const char* name;
    int size;
    int step;      // the distance between two ranks of the group
    int position;  // the position of this rank
    const std::string& backend;
  };
  const Kind kinds[] = {{"model", sizes_.model, 1, place_.model, model_backend},
                        {"pipeline", sizes_.pipeline, sizes_.model, place_.pipeline, pipeline_backend},
                        {"data", sizes_.data, part, place_.data, data_backend}};
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const Kind& kind = kinds[i];
    std::vector<int> ranks;
    ranks.reserve(static_cast<std::size_t>(kind.size));
    for (int other = 0; other < kind.size; ++other) ranks.push_back(rank + (other - kind.position) * kind.step);
    groups_[i] = world.split(ranks);
    // Some groups may be usable and others not. All ranks get the error of the first group that is not usable.
    group::inside(world.group()).together({.phase = "parallel groups"}, [&] {
      if (kind.backend.empty()) return;
      try {
        collectives::check_backend(kind.backend, groups_[i]->group());
      } catch (const Error& error) {
        throw error.with_context(fmt::format("the {}-parallel groups", kind.name));
      }
    });
  }
}

void init_parallelism(const MultiprocessConfig& config) {
  Made& all = made();
  const std::lock_guard lock(all.mutex);
  if (all.groups) throw Error(ErrorKind::invalid_argument, "init_parallelism() has already been called");
  all.groups = std::make_unique<ParallelGroups>(dist::process_group(), config.model_parallelism,
                                                config.pipeline_parallelism, config.model_parallel_backend,
                                                config.pipeline_parallel_backend, config.data_parallel_backend);
}

ParallelGroups& parallel_groups() {
  Made& all = made();
  const std::lock_guard lock(all.mutex);
  if (!all.groups)
    throw Error(ErrorKind::invalid_argument, "the parallel groups do not exist. Call init_parallelism() first");
  return *all.groups;
}

void destroy_parallel_groups() noexcept {
  Made& all = made();
  // In a forked child whose parent was changing the groups there are no groups.
  if (const auto lock = all.mutex.lock_unless_abandoned()) all.groups.reset();
}

}  // namespace muster
