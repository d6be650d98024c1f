// SPDX-License-Identifier: Apache-2.0
// Any text as a merge plan: it is refused with an Error, or it is a plan that finds rules for names and lays tensors
// out.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/merge_layout.hpp"
#include "src/checkpoint/row_copy.hpp"

namespace {

using namespace muster;

constexpr std::array<std::string_view, 6> names = {
    "", "a", "lm_head", "a.b.c", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "model.layers.11.self_attn.q_proj.weight"};

void lay_out(const MergePlan& plan, const NamedSpec& tensor, int ranks) {
  const SplitTensor split = split_layout(plan, tensor, ranks);
  const std::vector<std::vector<NamedSpec>> listings(static_cast<std::size_t>(ranks), {{tensor.name, split.shard}});
  PaddedSizes padded;
  if (split.padded) padded[tensor.name] = {split.dim, tensor.spec.shape[split.dim]};
  const MergedTensor merged = merge_layout(plan, listings, padded).at(0);
  if (merged.whole.shape != tensor.spec.shape) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const MergePlan plan = MergePlan::parse({reinterpret_cast<const char*>(data), size}, "fuzz");
    for (const std::string_view name : names) {
      if (plan.find(name) == nullptr) continue;
      for (const int ranks : {1, 3}) {
        try {
          lay_out(plan, {std::string(name), {DType::bf16, {5, 4}}}, ranks);
          lay_out(plan, {std::string(name), {DType::u4, {7}}}, ranks);
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
