// SPDX-License-Identifier: Apache-2.0
// Any text as a merge plan: it is refused with an Error, or it is a plan that finds rules for names, gives them new
// ones and takes them back, and lays tensors out.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
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

// What origin() says must be true, and a number that is replaced must be found again.
void rename(const MergePlan& plan, std::string_view name) {
  for (const std::optional<Numbering>& numbering : {plan.layers(), plan.experts()}) {
    if (!numbering || !numbering->pattern.find(name)) continue;
    const std::string other = numbering->pattern.replace(name, 70);
    if (numbering->pattern.find(other) != 70) std::abort();
  }
  try {
    const std::optional<MergePlan::Origin> origin = plan.origin(name);
    if (origin && (plan.find(origin->name) != origin->rule || MergePlan::renamed(*origin->rule, origin->name) != name))
      std::abort();
  } catch (const Error&) {
    return;  // a rule that cannot be turned around
  }
}

void resolve(const MergePlan& plan, std::string_view name) {
  for (const Shape& shape : {Shape{}, Shape{1}, Shape{5, 4}, Shape{2, 1, 3}}) {
    try {
      (void)plan.resolve(*plan.find(name), name, std::vector<TensorSpec>(3, {DType::f32, shape}));
      (void)plan.resolve(*plan.find(name), name, std::vector<TensorSpec>(1, {DType::f32, shape}), true);
    } catch (const Error&) {
      continue;  // a number of a config.json that is not there
    }
  }
}

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
      rename(plan, name);
      if (plan.find(name) == nullptr) continue;
      (void)MergePlan::renamed(*plan.find(name), name);
      resolve(plan, name);
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
