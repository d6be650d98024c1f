// SPDX-License-Identifier: Apache-2.0
// The shards of ranks as one model: arranged by the plan as an export arranges them, and merged piece by piece.

#include <fmt/core.h>

#include <filesystem>

#include "muster/error.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/shard_files.hpp"
#include "src/checkpoint/shard_set.hpp"
#include "src/core/quoted.hpp"
#include "src/inspect/tensor_source.hpp"

namespace muster::inspect {
namespace {

/// All tensors of all ranks.
class Shards {
 public:
  Shards(const std::string& directory, const StateChoice& choice)
      : set_(directory, 0, 1, choice), sources_(set_.sources()) {
    for (const ShardListing& listing : set_.listings()) {
      first_.push_back(count_);
      count_ += listing.tensors.tensors.size();
    }
  }
  [[nodiscard]] const ShardSet& set() const noexcept { return set_; }
  [[nodiscard]] const AssemblySource& at(const SourceRef& ref) const {
    return sources_[first_[static_cast<std::size_t>(ref.rank)] + ref.index];
  }

 private:
  ShardSet set_;
  std::vector<AssemblySource> sources_;
  std::vector<std::size_t> first_;  // of each rank, in sources_
  std::size_t count_ = 0;
};

/// A part of a tensor as a source of its own.
AssemblySource part_of(const AssemblySource& whole, const SourceRef& ref) {
  if (ref.bytes == 0) return whole;
  return {whole.file,
          [read = whole.read, begin = ref.begin](std::uint64_t offset, std::span<std::byte> target) {
            read(begin + offset, target);
          },
          ref.bytes};
}

MergedTensor merged_from(const ArrangedTensor& arranged, const Shards& shards) {
  MergedTensor merged{arranged.name, arranged.layout, {}, {}};
  const auto place_of = [&](const SourceRef& ref) {
    merged.sources.push_back(part_of(shards.at(ref), ref));
    merged.ranks.push_back(ref.rank);
    return merged.sources.size() - 1;
  };
  for (const SourceRef& ref : arranged.sources) place_of(ref);
  for (const std::vector<SourceRef>& set : arranged.equal) {
    const std::size_t first = place_of(set.front());
    for (std::size_t i = 1; i < set.size(); ++i) merged.equal.emplace_back(first, place_of(set[i]));
  }
  return merged;
}

}  // namespace

bool is_shards_directory(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return false;
  bool has_shards = false;
  for (const std::string& name : files_in(path)) {
    if (is_index_name(name) || name == model_file_name) return false;
    has_shards = has_shards || parse_shard_file_name(name);
  }
  return has_shards;
}

std::unique_ptr<TensorSource> open_shards(const std::string& directory, const SourceOptions& options) {
  const std::optional<Config> config = read_model_config(directory);
  const Shards shards(directory, options.states);
  std::vector<std::string> notes;
  const MergePlan plan = plan_of(shards.set().listings(), options.plan, config ? &*config : nullptr, notes);
  const ParallelLayout layout = layout_of(shards.set().listings(), {});
  std::vector<RankTensors> ranks;
  for (const ShardListing& listing : shards.set().listings()) ranks.push_back(listing.tensors);

  std::vector<MergedTensor> merged;
  for (const ArrangedTensor& tensor : arrange(plan, layout, ranks).tensors)
    merged.push_back(merged_from(tensor, shards));
  return std::make_unique<MergedSource>(std::move(merged), shards.set().metadata());
}

}  // namespace muster::inspect
