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

MergedTensor merged_from(const ArrangedTensor& arranged, const ShardSet& shards, std::span<const RankSources> ranks) {
  MergedTensor merged{arranged.name, arranged.layout, {}};
  const auto part_of = [&](const SourceRef& ref) -> TensorPart {
    const std::size_t tensor = ranks[static_cast<std::size_t>(ref.rank)].first + ref.index;
    return {ref.rank, tensor, ref.begin, ref.bytes != 0 ? ref.bytes : shards.tensors()[tensor].bytes};
  };
  for (const SourceRef& ref : arranged.sources) merged.parts.push_back(part_of(ref));
  for (const std::vector<SourceRef>& set : arranged.equal)
    for (std::size_t i = 1; i < set.size(); ++i) merged.equal.emplace_back(part_of(set.front()), part_of(set[i]));
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
  const auto shards = std::make_shared<const ShardSet>(directory, 0, 1, options.states);
  std::vector<std::string> notes;
  const MergePlan plan = plan_of(shards->listings(), options.plan, config ? &*config : nullptr, notes);
  const ParallelLayout layout = layout_of(shards->listings(), {});
  std::vector<RankTensors> ranks;
  std::vector<std::size_t> counts;
  for (const ShardListing& listing : shards->listings()) {
    ranks.push_back(to_rank_tensors(listing));
    counts.push_back(listing.tensors.size());
  }
  const std::vector<RankSources> places = sources_by_rank(counts, 1);
  std::vector<MergedTensor> merged;
  for (const ArrangedTensor& tensor : arrange(plan, layout, ranks).tensors)
    merged.push_back(merged_from(tensor, *shards, places));
  return std::make_unique<MergedSource>(MergedTensors(shards, std::move(merged)), shards->metadata());
}

}  // namespace muster::inspect
