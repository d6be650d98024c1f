// SPDX-License-Identifier: Apache-2.0
#pragma once
// The source of an export on one process: shards in files (ShardSet), or tensors in memory (LiveTensors).

#include <optional>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/parallel_layout.hpp"
#include "src/checkpoint/assembly/request.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/shard_metadata.hpp"

namespace muster {

/// A shard without its elements, as it is sent to rank 0.
struct ShardListing {
  int rank = 0;
  std::vector<NamedSpec> tensors = {};
  std::optional<ShardFacts> facts = {};  ///< as recorded in the shard
  /// Distinguishes the file from others and from its own older versions.
  std::string identity = {};
  std::string set = {};                       ///< workspace only: the job and the step, the same for all ranks
  std::optional<ParallelLayout> layout = {};  ///< derived from file names if the shard has none
  /// The places of the tensors in whole ones, one per tensor; empty: tensors of the model are cut by a plan.
  std::vector<PartPlace> places = {};
};
RankTensors to_rank_tensors(ShardListing listing);

/// Returns the layout of all ranks' shards: `given`, or else the recorded one, or else tensor parallelism alone. Throws
/// Error(invalid_argument) if `given` has another number of ranks, and Error(rank_mismatch) if the shards record
/// different layouts.
ParallelLayout layout_of(const std::vector<ShardListing>& listings, const std::optional<ParallelLayout>& given);

/// Returns the plan for the merge: `given` (as MergePlan::load takes it), or else the recorded one. Adds a note if both
/// exist and differ. Throws Error(rank_mismatch) if the shards record different plans, Error(invalid_argument) if there
/// is no plan, and as MergePlan::load.
MergePlan plan_of(const std::vector<ShardListing>& listings, const std::string& given, const Config* model_config,
                  std::vector<std::string>& notes);

/// Returns the config.json of the request's base, or, without a base, of its path. Throws Error(not_found) if the base
/// has none.
std::optional<Config> config_of(const Request& request);

/// Facts about a model in addition to its tensors.
struct ModelFacts {
  std::optional<Config> config = {};  ///< for plans; nullopt: unknown
  bool is_own = false;                ///< it is a config.json that programs load with the model
};

/// The tensors of one process, and the facts about them that an export uses. Immutable; thread-safe.
class ExportSource {
 public:
  virtual ~ExportSource() = default;
  /// The tensors of all listings of this process, in their order.
  [[nodiscard]] virtual const TensorSource& elements() const noexcept = 0;
  [[nodiscard]] virtual const std::vector<ShardListing>& listings() const noexcept = 0;
  /// The metadata of the files of the result.
  [[nodiscard]] virtual const Metadata& metadata() const noexcept = 0;
  /// Returns the files next to the weights that are copied from the request's path.
  [[nodiscard]] virtual ExtraFiles carried(const std::string& carry) const = 0;
  /// Returns the config for the request's plans.
  [[nodiscard]] virtual ModelFacts facts(const Request& request, std::vector<std::string>& notes) const = 0;
  /// If not empty, all processes have all tensors, and this text must be the same on all of them.
  [[nodiscard]] virtual const std::string& whole() const noexcept = 0;
  /// Verifies stored bytes against their own checksums, if there are any. Throws Error(corrupt).
  virtual void check_stored() const = 0;
  /// Facts for the user of the result.
  [[nodiscard]] virtual const std::vector<std::string>& notes() const noexcept = 0;
  /// Whether a later process can read the same tensors, and so resume the export.
  [[nodiscard]] virtual bool is_lasting() const noexcept = 0;
};

}  // namespace muster
