// SPDX-License-Identifier: Apache-2.0
// Any text as a merge plan: it is refused with an Error, or it is a plan that finds rules for names and lays tensors
// out.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/placement.hpp"

namespace {

using namespace muster;

constexpr std::array<std::string_view, 6> names = {
    "", "a", "lm_head", "a.b.c", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "model.layers.11.self_attn.q_proj.weight"};

// Cut for a layout and arranged again, a tensor is the same.
void lay_out(const MergePlan& plan, const NamedSpec& tensor, const ParallelLayout& layout) {
  const std::vector<WholeTensor> wholes = wholes_of(plan, std::span(&tensor, 1));
  const Placement placement = place(plan, layout, wholes);
  std::vector<RankTensors> ranks;
  for (std::size_t rank = 0; rank < placement.ranks.size(); ++rank) {
    RankTensors& mine = ranks.emplace_back(RankTensors{{}, placement.padded[rank]});
    for (const PlacedTensor& placed : placement.ranks[rank])
      mine.tensors.push_back({placed.name, placement.cuts[placed.whole].part});
  }
  const Arrangement arrangement = arrange(plan, layout, ranks);
  if (arrangement.tensors.size() != 1 || arrangement.tensors[0].layout.target.shape != tensor.spec.shape) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const MergePlan plan = MergePlan::parse({reinterpret_cast<const char*>(data), size}, "fuzz");
    for (const std::string_view name : names) {
      if (plan.find(name) == nullptr) continue;
      for (const ParallelLayout& layout : {ParallelLayout{1, 1, 1}, ParallelLayout{3, 1, 1}, ParallelLayout{2, 2, 2}}) {
        try {
          lay_out(plan, {std::string(name), {DType::bf16, {5, 4}}}, layout);
          lay_out(plan, {std::string(name), {DType::u4, {7}}}, layout);
        } catch (const Error&) {
          continue;  // a dimension that is not there, a rule without a way back
        }
      }
    }
  } catch (const Error&) {
    return 0;
  }
  return 0;
}
