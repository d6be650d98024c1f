// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/plan/placement.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "src/checkpoint/plan/plan_internal.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <unordered_map>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"

namespace muster {
namespace {

/// Distributes the numbers of layers or experts in contiguous ranges.
class Division {
 public:
  Division(const std::optional<Numbering>& numbering, int parts, std::span<const WholeTensor> wholes,
           std::string_view whose, std::string_view what)
      : numbering_(numbering) {
    if (parts == 1) return;
    std::int64_t count = 0;
    if (numbering)
      for (const WholeTensor& whole : wholes) count = std::max(count, numbering->find(whole.origin).value_or(-1) + 1);
    if (count > 0 && count < parts)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("{} {} cannot share {} {}: some of them would be empty", parts, whose, count, what));
    small_ = count / parts;
    larger_ = count % parts;
    is_divided_ = true;
  }

  /// Returns nullopt if the name has no such number, or there is only one part.
  [[nodiscard]] std::optional<int> part_of(const std::string& name) const {
    if (!is_divided_ || !numbering_) return std::nullopt;
    const auto number = numbering_->find(name);
    if (!number) return std::nullopt;
    const std::int64_t in_larger = larger_ * (small_ + 1);
    if (*number < in_larger) return static_cast<int>(*number / (small_ + 1));
    return static_cast<int>(larger_ + (*number - in_larger) / small_);
  }
  [[nodiscard]] std::string local_name(std::string name) const {
    const auto part = part_of(name);
    if (!part || !numbering_->renumber) return name;
    const std::int64_t begin = *part * small_ + std::min<std::int64_t>(*part, larger_);
    return numbering_->pattern.replace(name, *numbering_->pattern.find(name) - begin);
  }

 private:
  const std::optional<Numbering>& numbering_;
  std::int64_t small_ = 0;   // numbers per part
  std::int64_t larger_ = 0;  // number of parts that have one more
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

/// The cut of a whole tensor.
struct TensorCut {
  ResolvedMerge resolved;
  merge::Cut cut;
  int parts = 1;
  std::vector<BlockedPart> blocked = {};  // for each part, if it has all of the scale
};

std::size_t in_range(std::int64_t dim, const WholeTensor& whole) {
  return static_cast<std::size_t>(dim < 0 ? dim + static_cast<std::int64_t>(whole.spec.shape.size()) : dim);
}
std::size_t dimension(const ScaleAction& scale, const WholeTensor& whole) {
  return in_range(*scale.dim, whole);
}

class Cutter {
 public:
  Cutter(const MergePlan& plan, const ParallelLayout& layout, std::span<const WholeTensor> wholes)
      : plan_(plan), layout_(layout) {
    for (const WholeTensor& whole : wholes) by_name_.emplace(whole.origin, &whole);
  }

  [[nodiscard]] TensorCut operator()(const WholeTensor& whole) const {
    try {
      const WholeTensor* weight = weight_of(whole);
      TensorCut cutting = cut(whole, weight);
      if (cutting.parts > 1 && cutting.resolved.block != 0) fit_blocks(whole, cutting, *weight);
      return cutting;
    } catch (const Error& error) {
      throw error.with_context(fmt::format("tensor {} (rule {})", in_quotes(whole.origin), whole.rule->number));
    }
  }

 private:
  [[nodiscard]] const WholeTensor* weight_of(const WholeTensor& scale) const {
    for (const std::string& name : weights_of_scale(scale.origin))
      if (const auto found = by_name_.find(name); found != by_name_.end()) return found->second;
    return nullptr;
  }

  [[nodiscard]] TensorCut cut(const WholeTensor& whole, const WholeTensor* weight) const {
    const MergeRule& rule = *whole.rule;
    if (is_left_out(rule))
      throw Error(ErrorKind::invalid_argument,
                  "the action \"drop\" is not invertible, so the tensor cannot be sharded. Use \"same\"");
    const int parts = rule.across == Axis::expert ? layout_.expert : layout_.tensor;
    MergeFacts facts;
    facts.parts = parts;
    if (weight != nullptr) facts.weight = std::span(&weight->spec, 1);
    ResolvedMerge resolved = plan_.resolve(rule, whole.origin, std::span(&whole.spec, 1), true, facts);
    // A scale's element may cover several heads: fit_blocks() ensures that none is divided.
    const auto* scale = std::get_if<ScaleAction>(&rule.action);
    const std::int64_t heads = std::accumulate(resolved.heads.begin(), resolved.heads.end(), std::int64_t{0});
    if (parts == 1 || (scale != nullptr && heads != 0 && whole.spec.shape[dimension(*scale, whole)] % heads != 0))
      resolved.heads.clear();
    merge::Cut cut = merge::cut(resolved.merge, whole.spec, parts, resolved.heads);
    return {std::move(resolved), std::move(cut), parts};
  }

  /// A rank's elements of the scale must be those of its part of the weight, or all of them.
  void fit_blocks(const WholeTensor& whole, TensorCut& scale, const WholeTensor& weight) const {
    const TensorCut cutting = cut(weight, nullptr);
    const merge::Cut& weights = cutting.cut;
    const auto* concat = std::get_if<merge::Concat>(&cutting.resolved.merge);
    const std::size_t dim = dimension(std::get<ScaleAction>(whole.rule->action), whole);
    if (concat == nullptr || in_range(concat->dim, weight) != dim) return;
    const std::int64_t block = scale.resolved.block;
    const bool is_joined = std::holds_alternative<merge::Concat>(scale.resolved.merge);
    bool fits = is_joined || weights.part_units == weights.whole_units;
    for (std::size_t part = 0; fits && is_joined && part < weights.pieces.size(); ++part) {
      const std::vector<merge::UnitRange>& of_weight = weights.pieces[part];
      const std::vector<merge::UnitRange>& of_scale = scale.cut.pieces[part];
      fits = std::ranges::equal(of_weight, of_scale, [&](const merge::UnitRange& w, const merge::UnitRange& s) {
        return w.begin == s.begin * block && s.count == (w.count + block - 1) / block;
      });
    }
    if (fits) return;
    const bool is_one_run = std::ranges::all_of(weights.pieces, [](const auto& pieces) { return pieces.size() <= 1; });
    if (!to_string(weight.spec.dtype).starts_with("F8") || !is_one_run)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("each of {} ranks would have {} of {} elements of the weight, which splits its blocks of "
                              "{}. Use fewer ranks, a number of ranks that divides the blocks, or a dequantised model",
                              scale.parts, weights.part_units, weights.whole_units, block));
    for (const std::vector<merge::UnitRange>& pieces : weights.pieces)
      scale.blocked.push_back({dim, pieces.empty() ? weights.whole_units : pieces.front().begin, block});
    scale.resolved = {merge::same()};
    scale.cut = merge::cut(merge::same(), whole.spec, scale.parts);
  }

  const MergePlan& plan_;
  const ParallelLayout& layout_;
  std::unordered_map<std::string, const WholeTensor*> by_name_;
};

/// Returns the dimension whose original size must be recorded for the inverse. This is the dimension of a padded
/// tensor, or of a scale of which each rank has one element. Without the size, that element could be mistaken for one
/// of the whole tensor.
std::optional<std::size_t> dimension_to_remember(const WholeTensor& whole, const TensorCut& cutting) {
  if (cutting.cut.padded_dim) return cutting.cut.padded_dim;
  const auto* scale = std::get_if<ScaleAction>(&whole.rule->action);
  if (scale == nullptr || cutting.parts == 1 || !std::holds_alternative<merge::Concat>(cutting.resolved.merge))
    return {};
  const std::size_t dim = dimension(*scale, whole);
  return cutting.cut.part.shape[dim] == 1 ? std::optional(dim) : std::nullopt;
}

/// Throws if there are more ranks than query heads, because the attention output would be counted twice.
void check_layout(const MergePlan& plan, const ParallelLayout& layout) {
  const bool has_heads = std::ranges::any_of(plan.rules(), [](const MergeRule& rule) {
    const auto* concat = std::get_if<ConcatAction>(&rule.action);
    return concat != nullptr && !concat->heads.empty();
  });
  const auto heads = model_number(plan.model_config(), "num_attention_heads");
  if (has_heads && heads && layout.tensor > *heads)
    throw Error(ErrorKind::invalid_argument, fmt::format("layout {0} has {1} tensor-parallel ranks, and the model has "
                                                         "{2} attention heads. Use at most {2} tensor-parallel ranks",
                                                         to_string(layout), layout.tensor, *heads));
}

/// Notes about cuts that not every engine reads.
class Notes {
 public:
  explicit Notes(const ParallelLayout& layout) : layout_(layout) {}

  void see(const WholeTensor& whole, const TensorCut& cutting) {
    if (whole.rule->across == Axis::expert && layout_.expert == 1 && layout_.tensor > 1) {
      whole_experts_.push_back(whole.origin);
      expert_bytes_ += byte_size(whole.spec.dtype, whole.spec.shape);
    }
    bool is_shared = false;
    for (const std::int64_t heads : cutting.resolved.heads)
      is_shared = is_shared || merge::share_heads(heads, cutting.parts).ranks > 1;
    if (is_shared) shared_.push_back(whole.origin);
    if (!cutting.resolved.heads.empty() && cutting.cut.padded_dim) padded_.push_back(whole.origin);
    if (std::holds_alternative<merge::Concat>(cutting.resolved.merge) && cutting.cut.whole_units < cutting.parts &&
        !is_shared)
      idle_.push_back(whole.origin);
    if (!cutting.blocked.empty()) blocked_.push_back(whole.origin);
  }

  [[nodiscard]] std::vector<std::string> take() const {
    std::vector<std::string> notes;
    note_names(
        notes, shared_,
        "the tensor has fewer heads than ranks; neighbouring ranks have copies of one head, as engines load them");
    note_names(notes, padded_,
               "the number of ranks does not divide the number of heads; the last ranks have heads of zeros, which "
               "engines may reject");
    note_names(notes, idle_, "the tensor has fewer parts than ranks; the last ranks have only zeros");
    note_names(notes, blocked_,
               "the layout splits blocks of the weight; every rank has the whole tensor, and its shard records where "
               "its part of the weight begins");
    note_names(
        notes, whole_experts_,
        fmt::format(
            "each tensor-parallel rank has all experts ({:.1f} MB per rank). Use expert ranks (ep={}) to share them",
            static_cast<double>(expert_bytes_) / 1e6, layout_.tensor));
    return notes;
  }

 private:
  const ParallelLayout& layout_;
  std::vector<std::string> shared_;
  std::vector<std::string> padded_;
  std::vector<std::string> idle_;
  std::vector<std::string> blocked_;
  std::vector<std::string> whole_experts_;
  std::uint64_t expert_bytes_ = 0;
};

constexpr int most_ranks = 4096;

std::optional<int> parse_count(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > most_ranks) return std::nullopt;
  return value;
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
  if (!unmatched.empty()) throw Error(ErrorKind::invalid_argument, no_rule_words(plan, unmatched));
  return wholes;
}

Placement place(const MergePlan& plan, const ParallelLayout& layout, std::span<const WholeTensor> wholes) {
  check_numbering(plan, layout);
  check_layout(plan, layout);
  const Division layers(plan.layers(), layout.pipeline, wholes, "pipeline stages", "layers");
  const Division experts(plan.experts(), layout.expert, wholes, "expert ranks", "experts");
  const Cutter cutter(plan, layout, wholes);
  Notes notes(layout);
  Placement placement;
  placement.ranks.resize(static_cast<std::size_t>(layout.ranks()));
  placement.padded.resize(static_cast<std::size_t>(layout.ranks()));
  placement.heads.resize(static_cast<std::size_t>(layout.ranks()));
  placement.blocked.resize(static_cast<std::size_t>(layout.ranks()));
  for (std::size_t index = 0; index < wholes.size(); ++index) {
    const WholeTensor& whole = wholes[index];
    TensorCut cutting = cutter(whole);
    notes.see(whole, cutting);
    const std::optional<std::size_t> remembered = dimension_to_remember(whole, cutting);
    const bool has_uneven_heads =
        std::ranges::any_of(cutting.resolved.heads, [&](std::int64_t heads) { return heads % cutting.parts != 0; });
    placement.cuts.push_back(std::move(cutting.cut));
    const bool across_experts = whole.rule->across == Axis::expert;
    const auto layer = layers.part_of(whole.origin);
    const auto expert = across_experts ? std::nullopt : experts.part_of(whole.origin);
    const Stage stage = plan.stage_of(*whole.rule, whole.origin);
    const auto stages = layer ? std::pair(*layer, *layer + 1) : stages_of(stage, layout.pipeline);
    const std::string name = experts.local_name(layers.local_name(whole.origin));
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      const ParallelLayout::Coordinates at = layout.coordinates(rank);
      if (at.pipeline < stages.first || at.pipeline >= stages.second || (expert && at.expert != *expert)) continue;
      if (!layer && stage == Stage::ends && at.pipeline != 0 && at.pipeline != layout.pipeline - 1) continue;
      const auto place = static_cast<std::size_t>(rank);
      const int part = across_experts ? at.expert : at.tensor;
      placement.ranks[place].push_back({name, index, part});
      if (!cutting.blocked.empty())
        placement.blocked[place].emplace(name, cutting.blocked[static_cast<std::size_t>(part)]);
      if (remembered) placement.padded[place].emplace(name, std::pair(*remembered, whole.spec.shape[*remembered]));
      if (has_uneven_heads) placement.heads[place].emplace(name, cutting.resolved.heads);
    }
  }
  placement.notes = notes.take();
  return placement;
}

ParallelLayout ParallelLayout::parse(std::string_view text) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::invalid_argument,
                fmt::format("layout {}: {}. Write 4 (only tensor parallelism) or tp=2,pp=2,ep=2",
                            in_quotes(std::string(text)), why));
  };
  ParallelLayout layout;
  if (const auto tensor = parse_count(text)) {
    layout.tensor = *tensor;
    return layout;
  }
  std::int64_t ranks = 1;
  bool seen[3] = {};
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const std::size_t equals = item.find('=');
    const std::string_view key = item.substr(0, equals);
    const int which = key == "tp" ? 0 : key == "pp" ? 1 : key == "ep" ? 2 : -1;
    const auto count = equals == std::string_view::npos ? std::nullopt : parse_count(item.substr(equals + 1));
    if (which < 0 || !count) refuse(fmt::format("malformed part {}", in_quotes(std::string(item))));
    if (seen[which]) refuse(fmt::format("{} is duplicated", key));
    seen[which] = true;
    (which == 0 ? layout.tensor : which == 1 ? layout.pipeline : layout.expert) = *count;
    ranks *= *count;
    if (ranks > most_ranks) refuse(fmt::format("it has more than {} ranks", most_ranks));
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return layout;
}

std::string to_string(const ParallelLayout& layout) {
  if (layout.pipeline == 1 && layout.expert == 1) return std::to_string(layout.tensor);
  return fmt::format("tp={},pp={},ep={}", layout.tensor, layout.pipeline, layout.expert);
}

}  // namespace muster
