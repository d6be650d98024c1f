// SPDX-License-Identifier: Apache-2.0
#pragma once
// ParallelGroups: the model-parallel, pipeline and data-parallel groups of a job, created from their sizes. Semantics:
// init_parallelism of ml-starter and of the first versions of Megatron. Ranks of a model-parallel group have
// consecutive numbers. Ranks of a pipeline differ by the size of a model-parallel group, and data-parallel ranks by the
// size of a whole model:
//
//     rank = m + model * (p + pipeline * d)         8 ranks, model 2, pipeline 2:
//
//                                                      d = 0          d = 1
//                                                   m: 0   1       m: 0   1
//                                          p = 0       0 - 1          4 - 5
//                                                      |   |          |   |
//                                          p = 1       2 - 3          6 - 7
//
// "-" is a model-parallel group, "|" a pipeline. 0 and 4, 1 and 5, 2 and 6, 3 and 7 are data-parallel groups.

#include <array>
#include <memory>
#include <string>

#include "muster/compat/multiprocess.hpp"
#include "muster/process_group.hpp"

namespace muster {

/// The coordinates of a rank: its index in each of its three groups.
struct ParallelCoordinates {
  /// Index in the model-parallel group, or its size.
  int model = 0;
  /// Index in the pipeline, or its size.
  int pipeline = 0;
  /// Index in the data-parallel group, or its size.
  int data = 0;
};

/// The three groups of this rank.
class ParallelGroups {
 public:
  /// Creates the groups. Collective over `world`; all ranks pass the same numbers. The backends are names of
  /// dist::init_process_group(); empty means any. They are checked: with "shm", all ranks of each such group must be on
  /// one host. Throws on all ranks alike Error(invalid_argument) if the sizes do not divide the size of the world, and
  /// Error(unsupported) as dist::init_process_group(). Throws also as ProcessGroup::split().
  ParallelGroups(ProcessGroup& world, int model_parallelism, int pipeline_parallelism,
                 const std::string& model_backend = {}, const std::string& pipeline_backend = {},
                 const std::string& data_backend = {});

  /// Returns the coordinates of this rank.
  [[nodiscard]] const ParallelCoordinates& place() const noexcept { return place_; }
  /// Returns the sizes of the three groups.
  [[nodiscard]] const ParallelCoordinates& sizes() const noexcept { return sizes_; }
  /// Return the groups of this rank, valid as long as this object.
  [[nodiscard]] ProcessGroup& model() const noexcept { return *groups_[0]; }
  /// Returns the pipeline of this rank.
  [[nodiscard]] ProcessGroup& pipeline() const noexcept { return *groups_[1]; }
  /// Returns the data-parallel group of this rank.
  [[nodiscard]] ProcessGroup& data() const noexcept { return *groups_[2]; }

 private:
  ParallelCoordinates sizes_;
  ParallelCoordinates place_;
  std::array<std::unique_ptr<ProcessGroup>, 3> groups_;
};

/// Creates parallel_groups() with the sizes and backends of `config`. Collective over the ranks of
/// dist::init_process_group(). Throws as ParallelGroups, and Error(invalid_argument) if the groups already exist or no
/// process group exists.
void init_parallelism(const MultiprocessConfig& config);
/// Returns the groups of init_parallelism(). Throws Error(invalid_argument) if they do not exist. Local.
[[nodiscard]] ParallelGroups& parallel_groups();
/// Destroys the groups of init_parallelism(). Does nothing if they do not exist. Local.
void destroy_parallel_groups() noexcept;

}  // namespace muster
