// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/placement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

/// `count` numbers shared out in contiguous runs.
class Shares {
 public:
  Shares(std::int64_t count, int parts) : small_(count / parts), larger_(count % parts) {}
  [[nodiscard]] int part_of(std::int64_t number) const {
    const std::int64_t in_larger = larger_ * (small_ + 1);
    if (number < in_larger) return static_cast<int>(number / (small_ + 1));
    return static_cast<int>(larger_ + (number - in_larger) / small_);
  }
  [[nodiscard]] std::int64_t begin(int part) const { return part * small_ + std::min<std::int64_t>(part, larger_); }

 private:
  std::int64_t small_;
  std::int64_t larger_;
};

/// The numbers of layers or experts, and who has them.
class Division {
 public:
  Division(const std::optional<Numbering>& numbering, int parts, std::span<const WholeTensor> wholes)
      : numbering_(numbering), shares_(0, 1) {
    if (parts == 1) return;
    std::int64_t count = 0;
    if (numbering)
      for (const WholeTensor& whole : wholes)
        count = std::max(count, numbering->pattern.find(whole.origin).value_or(-1) + 1);
    shares_ = Shares(count, parts);
    is_divided_ = true;
  }

  /// None where the name has no such number, or there is one part only.
  [[nodiscard]] std::optional<int> part_of(const std::string& name) const {
    if (!is_divided_ || !numbering_) return std::nullopt;
    const auto number = numbering_->pattern.find(name);
    if (!number) return std::nullopt;
    return shares_.part_of(*number);
  }
  [[nodiscard]] std::string local_name(std::string name) const {
    const auto part = part_of(name);
    if (!part || !numbering_->renumber) return name;
    return numbering_->pattern.replace(name, *numbering_->pattern.find(name) - shares_.begin(*part));
  }

 private:
  const std::optional<Numbering>& numbering_;
  Shares shares_;
  bool is_divided_ = false;
};

std::pair<int, int> stages_of(Stage stage, int stages) {
  switch (stage) {
    case Stage::first:
      return {0, 1};
    case Stage::last:
      return {stages - 1, stages};
    case Stage::ends:
    case Stage::all:
      break;
  }
  return {0, stages};
}

merge::Cut cut_of(const MergePlan& plan, const ParallelLayout& layout, const WholeTensor& whole) {
  try {
    const MergeRule& rule = *whole.rule;
    if (std::holds_alternative<DropAction>(rule.action))
      throw Error(ErrorKind::argument, "\"drop\" has no way back, so it cannot be cut for ranks; use \"same\"");
    const int parts = rule.across == Axis::expert ? layout.expert : layout.tensor;
    const Merge merge = plan.resolve(rule, whole.origin, std::span(&whole.spec, 1), true).merge;
    merge::Cut cut = merge::cut(merge, whole.spec, parts);
    if (parts > 1 && std::holds_alternative<ScaleAction>(rule.action) && std::holds_alternative<Concat>(merge) &&
        element_count(cut.part.shape) == 1)
      throw Error(
          ErrorKind::argument,
          "each rank would get one element, which \"scale\" reads as a scale of the whole tensor; use \"concat\"");
    return cut;
  } catch (const Error& error) {
    throw error.with_context(fmt::format("tensor {} (rule {})", in_quotes(whole.origin), whole.rule->number));
  }
}

}  // namespace

std::vector<WholeTensor> wholes_of(const MergePlan& plan, std::span<const NamedSpec> model) {
  std::vector<WholeTensor> wholes;
  std::vector<std::string> unmatched;
  for (const NamedSpec& tensor : model) {
    if (auto origin = plan.origin(tensor.name))
      wholes.push_back({std::move(origin->name), origin->rule, tensor.spec});
    else
      unmatched.push_back(tensor.name);
  }
  if (!unmatched.empty()) throw Error(ErrorKind::argument, no_rule_words(plan, unmatched));
  return wholes;
}

Placement place(const MergePlan& plan, const ParallelLayout& layout, std::span<const WholeTensor> wholes) {
  const auto needs = [&](const auto& numbering, int parts, std::string_view key, std::string_view what) {
    if (parts > 1 && !numbering)
      throw Error(ErrorKind::argument, fmt::format("plan {} does not say where {} (\"{}\"), which the layout {} needs",
                                                   in_quotes(plan.name()), what, key, to_string(layout)));
  };
  needs(plan.layers(), layout.pipeline, "layers", "a layer has its number");
  needs(plan.experts(), layout.expert, "experts", "an expert has its number");
  const Division layers(plan.layers(), layout.pipeline, wholes);
  const Division experts(plan.experts(), layout.expert, wholes);
  Placement placement;
  placement.ranks.resize(static_cast<std::size_t>(layout.ranks()));
  placement.padded.resize(static_cast<std::size_t>(layout.ranks()));
  for (std::size_t index = 0; index < wholes.size(); ++index) {
    const WholeTensor& whole = wholes[index];
    const merge::Cut& cut = placement.cuts.emplace_back(cut_of(plan, layout, whole));
    const bool across_experts = whole.rule->across == Axis::expert;
    const auto layer = layers.part_of(whole.origin);
    const auto expert = across_experts ? std::nullopt : experts.part_of(whole.origin);
    const auto stages = layer ? std::pair(*layer, *layer + 1) : stages_of(whole.rule->stage, layout.pipeline);
    const std::string name = experts.local_name(layers.local_name(whole.origin));
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      const ParallelLayout::Place at = layout.place(rank);
      if (at.pipeline < stages.first || at.pipeline >= stages.second || (expert && at.expert != *expert)) continue;
      if (!layer && whole.rule->stage == Stage::ends && at.pipeline != 0 && at.pipeline != layout.pipeline - 1)
        continue;
      placement.ranks[static_cast<std::size_t>(rank)].push_back({name, index, across_experts ? at.expert : at.tensor});
      if (cut.padded_dim)
        placement.padded[static_cast<std::size_t>(rank)].emplace(
            name, std::pair(*cut.padded_dim, whole.spec.shape[*cut.padded_dim]));
    }
  }
  return placement;
}

}  // namespace muster
