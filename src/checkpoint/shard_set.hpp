// SPDX-License-Identifier: Apache-2.0
#pragma once
// The shards of ranks as files: which process of a job reads which, and what they say of themselves.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/safetensors.hpp"
#include "muster/state_file.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/assembly.hpp"
#include "src/checkpoint/checksums.hpp"
#include "src/checkpoint/shard_metadata.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/workspace/survey.hpp"

namespace muster {

/// What a shard is without its elements: as it travels to the first process.
struct ShardListing {
  int rank = 0;
  std::vector<NamedSpec> tensors = {};
  std::optional<ShardFacts> facts = {};  ///< that it says of itself
  std::string identity = {};             ///< tells the file from others and from itself before a change
  std::string set = {};                  ///< of a workspace: the job and the generation, the same for all ranks
};
RankTensors to_rank_tensors(ShardListing listing);

Config to_config(const ShardListing& listing);
/// Throws Error(corrupt) where it is no listing.
ShardListing listing_from_config(const Config& config);

/// Of all ranks' shards: `given`, else what they say of themselves, else tensor parallelism alone. Throws
/// Error(argument) where the given one has another number of ranks, Error(rank_mismatch) where they do not say the
/// same.
ParallelLayout layout_of(const std::vector<ShardListing>& listings, const std::optional<ParallelLayout>& given);

/// The plan that they are merged by: `given` (as MergePlan::load takes it), else the one that they were cut by. A note
/// says so if both are there and differ. Throws Error(rank_mismatch) if they were not cut by one plan, Error(argument)
/// if there is neither, and as MergePlan::load.
MergePlan plan_of(const std::vector<ShardListing>& listings, const std::string& given, const Config* model_config,
                  std::vector<std::string>& notes);

/// The shards that one process reads: rank, rank + processes, ... They are safetensors files of a directory, which are
/// held against their checksums as they are read, or the states of a workspace that all ranks have
/// (workspace::choose_common_states).
class ShardSet : public TensorSource {
 public:
  /// Opens them. `choice`: of a workspace. Throws Error(not_found | corrupt | io | argument) that names the file.
  ShardSet(const std::string& directory, int process, int processes, const workspace::StateChoice& choice = {});

  /// Of all processes' shards.
  [[nodiscard]] int count() const noexcept { return count_; }
  [[nodiscard]] const std::vector<ShardListing>& listings() const noexcept { return listings_; }
  /// Of all of them, shard after shard.
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return tensors_; }
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  /// Of the first of them; without what says that it is a shard.
  [[nodiscard]] const Metadata& metadata() const noexcept { return metadata_; }

 private:
  struct Shard {
    std::size_t first = 0;  // of its tensors, among all
    std::optional<SafetensorsFile> file = {};
    std::vector<std::shared_ptr<const CheckedTensor>> checked = {};  // by tensor; null: it has no checksums
    std::optional<StateFile> state = {};
  };
  void open_files(const std::string& directory, int process, int processes);
  void open_states(const std::string& workspace, int process, int processes, const workspace::StateChoice& choice);
  template <class File>
  void add(Shard shard, const File& file, const Metadata& metadata, int rank, std::string set);
  [[nodiscard]] const Shard& shard_of(std::size_t tensor) const;

  int count_ = 0;
  std::vector<Shard> shards_;
  std::vector<TensorEntry> tensors_;
  std::vector<ShardListing> listings_;
  Metadata metadata_;
};

}  // namespace muster
