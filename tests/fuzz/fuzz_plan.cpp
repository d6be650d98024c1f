// SPDX-License-Identifier: Apache-2.0
// Any text as a merge plan. It is refused with an Error, or yields a plan that finds rules for names, renames them,
// inverts the renaming, and lays out tensors.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/placement.hpp"
#include "src/checkpoint/plan/plan_views.hpp"

namespace {

using namespace muster;

constexpr std::array<std::string_view, 6> names = {
    "", "a", "lm_head", "a.b.c", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "model.layers.11.self_attn.q_proj.weight"};

// The result of origin() must be right, and a replaced number must be found again.
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
    return;  // a rule that cannot be inverted
  }
}

void resolve(const MergePlan& plan, std::string_view name) {
  for (const Shape& shape : {Shape{}, Shape{1}, Shape{5, 4}, Shape{2, 1, 3}}) {
    try {
      (void)plan.resolve(*plan.find(name), name, std::vector<TensorSpec>(3, {DType::f32, shape}));
      (void)plan.resolve(*plan.find(name), name, std::vector<TensorSpec>(1, {DType::f32, shape}), true);
    } catch (const Error&) {
      continue;  // config.json lacks a number
    }
  }
}

// A tensor that is cut for a layout and arranged again must be the same.
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

// A view must be inverted correctly, or refuse the inverse.
void view(const MergePlan& plan, const NamedSpec& tensor) {
  const ViewedRank viewed = view_rank(plan, {.tensor = 2}, {{tensor}, {}});
  const std::int64_t elements = element_count(tensor.spec.shape);
  for (const ViewedTensor& part : viewed.views)
    for (const merge::StridedBox& box : part.boxes) {
      std::int64_t last = box.from;
      for (const merge::BoxAxis& axis : box.axes) last += (axis.count - 1) * axis.from;
      if (elements != 0 && (box.from < 0 || last >= elements)) std::abort();
      if (merge::reversed(merge::reversed(box)).from != box.from) std::abort();
    }
  if (viewed.tensors.tensors.empty()) return;
  const std::vector<ViewedTensor> back = unview_rank(plan, {.tensor = 2}, viewed.tensors.tensors);
  if (back.size() == 1 && back.front().name == tensor.name && back.front().spec.shape != tensor.spec.shape)
    std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const MergePlan plan = MergePlan::parse({reinterpret_cast<const char*>(data), size}, "fuzz");
    for (const std::string_view name : names) {
      rename(plan, name);
      for (const Shape& shape : {Shape{}, Shape{1}, Shape{12, 4}, Shape{3, 8, 2}}) {
        try {
          view(plan, {std::string(name), {DType::bf16, shape}});
        } catch (const Error&) {
          continue;
        }
      }
      if (plan.find(name) == nullptr) continue;
      (void)MergePlan::renamed(*plan.find(name), name);
      resolve(plan, name);
      for (const ParallelLayout& layout : {ParallelLayout{1, 1, 1}, ParallelLayout{3, 1, 1}, ParallelLayout{2, 2, 2}}) {
        try {
          lay_out(plan, {std::string(name), {DType::bf16, {5, 4}}}, layout);
          lay_out(plan, {std::string(name), {DType::u4, {7}}}, layout);
        } catch (const Error&) {
          continue;  // a missing dimension, or a rule that cannot be inverted
        }
      }
    }
  } catch (const Error&) {
    return 0;
  }
  return 0;
}
