// SPDX-License-Identifier: Apache-2.0
#pragma once
// ParallelGroups: the groups of ranks that share matrices, pass activations on, or average gradients, made from sizes.
// Semantics: init_parallelism of ml-starter (and of Megatron's first versions): ranks of a model-parallel group are
// neighbours, those of a pipeline a model's size apart, data-parallel ones a whole model apart:
//
//     rank = m + model * (p + pipeline * d)         8 ranks, model 2, pipeline 2:
//
//                                                      d = 0          d = 1
//                                                   m: 0   1       m: 0   1
//                                          p = 0       0 - 1          4 - 5
//                                                      |   |          |   |
//                                          p = 1       2 - 3          6 - 7
//
// "-" is a model-parallel group, "|" a pipeline; 0 and 4, 1 and 5, 2 and 6, 3 and 7 are data-parallel groups.

#include <array>
#include <memory>
#include <string>

#include "muster/multiprocess.hpp"
#include "muster/process_group.hpp"

namespace muster {

/// Which part of a model and of the data a rank has.
struct ParallelPlace {
  int model = 0;
  int pipeline = 0;
  int data = 0;
};

class ParallelGroups {
 public:
  /// Collective over `world`, with the same numbers on all ranks. Backends are names of dist::init_process_group(),
  /// and are checked: "shm" has to have all ranks of each such group on one host. Empty: any. Throws Error(argument) if
  /// the sizes do not divide that of the world, Error(unsupported) as dist::init_process_group(), on all ranks alike;
  /// as ProcessGroup::split().
  ParallelGroups(ProcessGroup& world, int model_parallelism, int pipeline_parallelism,
                 const std::string& model_backend = {}, const std::string& pipeline_backend = {},
                 const std::string& data_backend = {});

  [[nodiscard]] const ParallelPlace& place() const noexcept { return place_; }
  /// Ranks of the three kinds of groups.
  [[nodiscard]] const ParallelPlace& sizes() const noexcept { return sizes_; }
  /// This rank's. Live as long as this.
  [[nodiscard]] ProcessGroup& model() const noexcept { return *groups_[0]; }
  [[nodiscard]] ProcessGroup& pipeline() const noexcept { return *groups_[1]; }
  [[nodiscard]] ProcessGroup& data() const noexcept { return *groups_[2]; }

 private:
  ParallelPlace sizes_;
  ParallelPlace place_;
  std::array<std::unique_ptr<ProcessGroup>, 3> groups_;
};

/// Collective over the ranks of dist::init_process_group(): makes parallel_groups(), by the sizes and backends of
/// `config`. Throws as ParallelGroups, and Error(argument) if there are some already or there is no process group.
void init_parallelism(const MultiprocessConfig& config);
/// Throws Error(argument) before init_parallelism().
[[nodiscard]] ParallelGroups& parallel_groups();
/// Local. Ends them; nothing if there are none.
void destroy_parallel_groups() noexcept;

}  // namespace muster
