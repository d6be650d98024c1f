// SPDX-License-Identifier: Apache-2.0
#pragma once
// Plans for tests, made from their rules.

#include <cstddef>
#include <string>
#include <vector>

#include "muster/plan.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/placement.hpp"

namespace muster::test {

/// `more` contains members before the rules, each followed by a comma.
inline MergePlan plan_of(const std::string& rules, const std::string& more = "") {
  return MergePlan::parse(R"({"muster_plan": 1, )" + more + R"("rules": [)" + rules + "]}", "p.json");
}

/// Cuts the tensors of a model for `ranks` tensor-parallel ranks, and arranges the parts for a merge.
inline Arrangement cut_and_arranged(const MergePlan& plan, const std::vector<NamedSpec>& tensors, int ranks) {
  const Placement placement = place(plan, {.tensor = ranks}, wholes_of(plan, tensors));
  std::vector<RankTensors> shards;
  for (std::size_t rank = 0; rank < placement.ranks.size(); ++rank) {
    RankTensors& shard = shards.emplace_back(RankTensors{{}, placement.padded[rank], placement.heads[rank], true});
    for (const PlacedTensor& placed : placement.ranks[rank])
      shard.tensors.push_back({placed.name, placement.cuts[placed.whole].part});
  }
  return arrange(plan, {.tensor = ranks}, shards);
}

}  // namespace muster::test
