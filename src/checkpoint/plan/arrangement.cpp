// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "src/checkpoint/plan/plan_internal.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"

namespace muster {
namespace {

[[noreturn]] void refuse_tensors(const std::string& words) {
  throw Error(ErrorKind::invalid_argument, words);
}

using Place = ParallelLayout::Coordinates;

/// The offsets that convert the numbers of each stage (or expert rank) to the model's.
class Offsets {
 public:
  Offsets(const std::optional<Numbering>& numbering, int count, int Place::*coordinate, std::string_view whose,
          std::string_view what)
      : coordinate_(coordinate), whose_(whose), what_(what), numbers_(static_cast<std::size_t>(count)) {
    if (numbering && numbering->renumber && count > 1) numbering_ = &*numbering;
  }

  void see(const Place& place, std::string_view name) {
    if (numbering_ == nullptr) return;
    if (const auto number = numbering_->find(name)) numbers_[index(place)].insert(*number);
  }

  void settle() {
    offsets_.assign(numbers_.size(), 0);
    if (numbering_ == nullptr) return;
    std::int64_t base = 0;
    for (std::size_t i = 0; i < numbers_.size(); ++i) {
      const std::set<std::int64_t>& mine = numbers_[i];
      if (mine.empty()) continue;
      const auto count = static_cast<std::int64_t>(mine.size());
      const bool follows = *mine.rbegin() - *mine.begin() + 1 == count;
      // Numbers that count from 0 are shifted; numbers that are the model's already are kept.
      if (follows && *mine.begin() == 0)
        offsets_[i] = base;
      else if (!follows || *mine.begin() != base)
        throw Error(
            ErrorKind::rank_mismatch,
            fmt::format(
                "{} {} has the {} {}: they must be 0 to {} (numbers of the rank) or {} to {} (numbers of the model)",
                whose_, i, what_, some_numbers(mine), count - 1, base, base + count - 1));
      base += count;
    }
  }

  [[nodiscard]] std::string apply(const Place& place, std::string name) const {
    const std::int64_t offset = offsets_[index(place)];
    if (offset == 0) return name;
    const auto number = numbering_->find(name);
    return number ? numbering_->pattern.replace(name, *number + offset) : name;
  }

 private:
  [[nodiscard]] std::size_t index(const Place& place) const { return static_cast<std::size_t>(place.*coordinate_); }
  static std::string some_numbers(const std::set<std::int64_t>& numbers) {
    const std::vector<std::int64_t> all(numbers.begin(), numbers.end());
    const std::size_t shown = std::min<std::size_t>(all.size(), 8);
    return fmt::format("{}{}", fmt::join(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(shown), ", "),
                       shown < all.size() ? " ..." : "");
  }

  int Place::*coordinate_;
  std::string_view whose_;
  std::string_view what_;
  const Numbering* numbering_ = nullptr;
  std::vector<std::set<std::int64_t>> numbers_;
  std::vector<std::int64_t> offsets_;
};

/// One name of the model and the ranks that have it, in their order.
struct SharedName {
  std::string name;
  std::vector<SourceRef> refs;
};

class Arranging {
 public:
  Arranging(const MergePlan& plan, const ParallelLayout& layout, std::span<const RankTensors> ranks, Extent extent)
      : plan_(plan), layout_(layout), ranks_(ranks), extent_(extent) {}

  Arrangement operator()() {
    check_layout();
    collect();
    check_numbers();
    find_rules();
    Arrangement result;
    std::vector<std::size_t> ties;
    for (std::size_t i = 0; i < found_.size(); ++i) {
      const MergeRule& rule = *rules_[i];
      if (const auto* drop = std::get_if<DropAction>(&rule.action))
        result.dropped.push_back({found_[i].name, &rule, found_[i].refs, drop->reason});
      else if (std::holds_alternative<TieAction>(rule.action))
        ties.push_back(i);
      else
        result.tensors.push_back(merged(found_[i], rule));
    }
    if (!twice_.empty())
      refuse_tensors(fmt::format("{} {} more than one source: {}. {}", some_names(twice_),
                                 twice_.size() == 1 ? "has" : "have", twice_where_, twice_advice_));
    for (const std::size_t i : ties) tie(found_[i], *rules_[i], result);
    std::ranges::sort(result.tensors, natural_less, &ArrangedTensor::name);
    check_results(result.tensors);
    note_names(result.notes, shared_heads_,
               "several ranks have the same heads; their bytes are compared, and one copy is used");
    if (extent_ == Extent::model) note_unused_rules(plan_, rules_used(result), result.notes);
    return result;
  }

 private:
  void check_layout() const {
    if (layout_.ranks() != static_cast<int>(ranks_.size()))
      refuse_tensors(fmt::format("layout {} has {} ranks, and the source has {}", to_string(layout_), layout_.ranks(),
                                 ranks_.size()));
    check_numbering(plan_, layout_);
  }

  void collect() {
    // A unit does not show the number of layers before a stage.
    const auto& layers = extent_ == Extent::model ? plan_.layers() : std::nullopt;
    Offsets stages(layers, layout_.pipeline, &Place::pipeline, "pipeline stage", "layers");
    Offsets experts(plan_.experts(), layout_.expert, &Place::expert, "expert rank", "experts");
    for (int rank = 0; rank < layout_.ranks(); ++rank) {
      for (const NamedSpec& tensor : tensors_of(rank)) {
        stages.see(layout_.coordinates(rank), tensor.name);
        experts.see(layout_.coordinates(rank), tensor.name);
      }
    }
    stages.settle();
    experts.settle();
    for (int rank = 0; rank < layout_.ranks(); ++rank) {
      const Place place = layout_.coordinates(rank);
      const auto& tensors = tensors_of(rank);
      for (std::uint32_t index = 0; index < tensors.size(); ++index) {
        std::string name = experts.apply(place, stages.apply(place, tensors[index].name));
        const auto [entry, is_new] = by_name_.try_emplace(name, found_.size());
        if (is_new) found_.push_back({std::move(name), {}});
        auto& refs = found_[entry->second].refs;
        if (!refs.empty() && refs.back().rank == rank)
          refuse_tensors(
              fmt::format("tensor {}: rank {} has two sources for this name", in_quotes(entry->first), rank));
        refs.push_back({rank, index});
      }
    }
  }

  // Layers or experts that no rank has would be lost without an error.
  void check_numbers() const {
    if (layout_.pipeline > 1 && extent_ == Extent::model) check_holes(*plan_.layers(), "layer", "pipeline stages");
    if (layout_.expert > 1) check_holes(*plan_.experts(), "expert", "expert ranks");
  }

  void check_holes(const Numbering& numbering, std::string_view what, std::string_view whose) const {
    std::map<std::string, std::set<std::int64_t>> numbers;
    for (const SharedName& found : found_)
      if (const auto number = numbering.find(found.name)) {
        // Layers differ in their tensors, so all names are counted together; the experts of one layer do not differ.
        numbers[what == "layer" ? std::string() : numbering.pattern.replace(found.name, 0)].insert(*number);
      }
    for (const auto& [name, present] : numbers) {
      std::int64_t next = 0;
      for (const std::int64_t number : present) {
        if (number != next)
          refuse_tensors(
              fmt::format("no rank has {} {}{}, but a rank has {}. Pass the complete set of {}, or correct the "
                          "patterns of numbers in the plan",
                          what, next, name.empty() ? "" : " of " + in_quotes(name), number, whose));
        ++next;
      }
    }
  }

  void find_rules() {
    std::vector<std::string> unmatched;
    for (const SharedName& found : found_) {
      rules_.push_back(plan_.find(found.name));
      if (rules_.back() == nullptr) unmatched.push_back(found.name);
    }
    if (!unmatched.empty()) refuse_tensors(no_rule_words(plan_, unmatched));
  }

  ArrangedTensor merged(const SharedName& found, const MergeRule& rule) {
    try {
      return join_sources(found, rule);
    } catch (const Error& error) {
      throw error.with_context(fmt::format("tensor {} (rule {})", in_quotes(found.name), rule.number));
    }
  }

  ArrangedTensor join_sources(const SharedName& found, const MergeRule& rule) {
    ArrangedTensor tensor{MergePlan::renamed(rule, found.name), found.name, &rule, {}, {}, {}, {}};
    const Place first = layout_.coordinates(found.refs.front().rank);
    std::set<int> stages;
    std::set<int> experts;
    for (const SourceRef& ref : found.refs) {
      stages.insert(layout_.coordinates(ref.rank).pipeline);
      experts.insert(layout_.coordinates(ref.rank).expert);
    }
    const bool is_layer = layout_.pipeline > 1 && plan_.layers()->find(found.name);
    const bool is_expert = layout_.expert > 1 && rule.across == Axis::tensor && plan_.experts()->find(found.name);
    const Stage has_it = plan_.stage_of(rule, found.name);
    if (stages.size() > 1 && (is_layer || has_it == Stage::first || has_it == Stage::last)) {
      note_twice(found, "pipeline stages", stages,
                 is_layer ? "If stages count their layers from 0, add \"renumber\" to \"layers\" of the plan"
                          : "If several stages have the tensor, add \"stage\": \"ends\" or \"all\" to its rule");
      return tensor;
    }
    if (is_expert && experts.size() > 1) {
      note_twice(found, "expert ranks", experts,
                 "If expert ranks count their experts from 0, add \"renumber\" to \"experts\" of the plan");
      return tensor;
    }
    if (std::holds_alternative<merge::First>(rule.action)) {
      // The tensors of other ranks are ignored.
      const SourceRef& ref = found.refs.front();
      if (first.tensor != 0) lacks(layout_.rank({0, first.pipeline, first.expert}));
      tensor.sources = {ref};
      tensor.unused.assign(found.refs.begin() + 1, found.refs.end());
      tensor.layout = merge::join(merge::First{}, std::vector{spec(ref)});
      return tensor;
    }
    const bool across_experts = rule.across == Axis::expert;
    const int parts = across_experts ? layout_.expert : layout_.tensor;
    std::vector<TensorSpec> specs;
    std::vector<int> names;
    for (int part = 0; part < parts; ++part) {
      std::vector<SourceRef> copies;
      for (const int stage : stages) {
        for (int other = 0; other < (across_experts ? layout_.tensor : layout_.expert); ++other) {
          const Place place = across_experts ? Place{other, stage, part} : Place{part, stage, other};
          if (is_expert && place.expert != *experts.begin()) continue;
          copies.push_back(source_at(found, layout_.rank(place)));
          check_equal_specs(copies.front(), copies.back());
        }
      }
      tensor.sources.push_back(copies.front());
      specs.push_back(spec(copies.front()));
      names.push_back(copies.front().rank);
      if (copies.size() > 1) tensor.equal.push_back(std::move(copies));
    }
    const std::vector<TensorSpec> weight = weight_specs(found.name, tensor.sources);
    MergeFacts facts{.weight = weight};
    const RankTensors& one = ranks_[static_cast<std::size_t>(tensor.sources.front().rank)];
    facts.is_whole = one.blocked.contains(one.tensors[tensor.sources.front().index].name);
    if (const auto padding = padding_of(tensor.sources.front())) facts.cut_along = padding->first;
    const ResolvedMerge resolved = plan_.resolve(rule, found.name, specs, false, facts);
    const std::vector<std::int64_t> heads = heads_of(found, rule, resolved, tensor.sources);
    tensor.layout = merge::join(resolved.merge, specs, true_size(tensor.sources, resolved), names, heads);
    add_copies(tensor);
    if (!tensor.layout.must_equal.empty()) {
      std::vector<SourceRef> all = tensor.sources;
      for (const auto& copies : tensor.equal) all.insert(all.end(), copies.begin() + 1, copies.end());
      tensor.equal = {std::move(all)};
    }
    return tensor;
  }

  /// Every rank's part must equal the same part of the tensor to which it is tied, of a rank with the same
  /// tensor-parallel number.
  void tie(const SharedName& found, const MergeRule& rule, Arrangement& result) const {
    const std::string other = MergePlan::renamed(rule, found.name);
    const auto refuse = [&](std::string_view words) {
      refuse_tensors(fmt::format("tensor {} (rule {}): tied to {}, {}", in_quotes(found.name), rule.number,
                                 in_quotes(other), words));
    };
    const auto to = std::ranges::find(result.tensors, other, &ArrangedTensor::origin);
    if (to == result.tensors.end()) refuse("which does not exist, or is left out as well");
    const std::vector<SourceRef>& refs = found_[by_name_.at(other)].refs;
    for (const SourceRef& ref : found.refs) {
      const auto same = std::ranges::find_if(refs, [&](const SourceRef& r) {
        return layout_.coordinates(r.rank).tensor == layout_.coordinates(ref.rank).tensor;
      });
      if (same == refs.end()) refuse("but no rank has the same part of both");
      if (spec(*same) != spec(ref))
        refuse(fmt::format("which is {} on rank {}, but this tensor is {} on rank {}", to_string(spec(*same)),
                           same->rank, to_string(spec(ref)), ref.rank));
      to->equal.push_back({*same, ref});
    }
    result.dropped.push_back({found.name, &rule, found.refs, fmt::format("it is tied to {}", in_quotes(other))});
  }

  /// Returns the weights of the scale's ranks; empty if the tensor is not a scale, or a rank lacks its weight.
  [[nodiscard]] std::vector<TensorSpec> weight_specs(std::string_view scale, std::span<const SourceRef> sources) const {
    auto found = by_name_.end();
    for (const std::string& name : weights_of_scale(scale))
      if (found == by_name_.end()) found = by_name_.find(name);
    if (found == by_name_.end()) return {};
    std::vector<TensorSpec> specs;
    const std::vector<SourceRef>& refs = found_[found->second].refs;
    for (const SourceRef& source : sources) {
      const auto ref = std::ranges::lower_bound(refs, source.rank, {}, &SourceRef::rank);
      if (ref == refs.end() || ref->rank != source.rank) return {};
      specs.push_back(spec(*ref));
    }
    return specs;
  }

  /// Returns the heads by which the tensor was cut if its parts are not consecutive slices; otherwise empty.
  std::vector<std::int64_t> heads_of(const SharedName& found, const MergeRule& rule, const ResolvedMerge& resolved,
                                     std::span<const SourceRef> sources) {
    const auto parts = static_cast<int>(sources.size());
    const auto* concat = std::get_if<merge::Concat>(&resolved.merge);
    if (parts == 1 || concat == nullptr) return {};
    const RankTensors& rank = ranks_[static_cast<std::size_t>(sources.front().rank)];
    if (rank.is_ours) {
      const auto cut = rank.heads.find(rank.tensors[sources.front().index].name);
      return note_shared(found, cut == rank.heads.end() ? std::vector<std::int64_t>() : cut->second, parts);
    }
    const auto* action = std::get_if<ConcatAction>(&rule.action);
    const bool needs_heads = action != nullptr && !action->heads.empty();
    if (needs_heads && resolved.heads.empty()) refuse_tensors(unknown_heads_words(plan_, action->heads.front(), parts));
    std::int64_t held = 0;
    bool divides = true;
    for (std::size_t block = 0; block < resolved.heads.size(); ++block) {
      const std::int64_t heads = resolved.heads[block];
      held += merge::share_heads(heads, parts).heads * (concat->blocks.empty() ? 1 : concat->blocks[block] / heads);
      divides = divides && heads % parts == 0;
    }
    if (divides) return {};
    if (needs_heads && resolved.head_size == 0) refuse_tensors(unknown_heads_words(plan_, {0, "head_dim"}, parts));
    const Shape& shape = spec(sources.front()).shape;
    const auto dim =
        static_cast<std::size_t>(concat->dim < 0 ? concat->dim + static_cast<std::int64_t>(shape.size()) : concat->dim);
    if (resolved.head_size == 0 || dim >= shape.size() || shape[dim] != held * resolved.head_size) return {};
    return note_shared(found, resolved.heads, parts);
  }

  std::vector<std::int64_t> note_shared(const SharedName& found, std::vector<std::int64_t> heads, int parts) {
    if (std::ranges::any_of(heads, [&](std::int64_t count) { return merge::share_heads(count, parts).ranks > 1; }))
      shared_heads_.push_back(found.name);
    return heads;
  }

  /// Parts that several ranks share are compared like whole tensors that several ranks have.
  void add_copies(ArrangedTensor& tensor) const {
    const merge::Layout& layout = tensor.layout;
    const auto bytes = [&](std::int64_t units) { return byte_size(layout.target.dtype, {units * layout.grain.inner}); };
    std::map<std::pair<int, std::int64_t>, std::vector<SourceRef>> sets;
    for (const merge::Copy& copy : layout.copies) {
      const bool is_all = copy.count == layout.source_units[static_cast<std::size_t>(copy.source)];
      if (!is_all && layout.grain.rows != 1)
        refuse_tensors(
            "ranks share heads of fused tensors along a dimension other than the first, which is not supported");
      const auto part = [&](int source) {
        SourceRef ref = tensor.sources[static_cast<std::size_t>(source)];
        if (!is_all) {
          ref.begin = bytes(copy.begin);
          ref.bytes = bytes(copy.count);
        }
        return ref;
      };
      auto& set = sets[{copy.source, copy.begin}];
      if (set.empty()) set.push_back(part(copy.source));
      set.push_back(part(copy.other));
    }
    for (auto& [place, set] : sets) tensor.equal.push_back(std::move(set));
  }

  void note_twice(const SharedName& found, std::string_view where, const std::set<int>& who, std::string_view advice) {
    twice_.push_back(found.name);
    if (twice_where_.empty()) twice_where_ = fmt::format("{} {} have it", where, fmt::join(who, " and "));
    if (twice_advice_.empty()) twice_advice_ = advice;
  }

  [[noreturn]] static void lacks(int rank) {
    throw Error(
        ErrorKind::rank_mismatch,
        fmt::format("it does not exist on rank {}: its shard belongs to another model, or has another plan or layout",
                    rank),
        {.rank = rank});
  }

  [[nodiscard]] static SourceRef source_at(const SharedName& found, int rank) {
    const auto ref = std::ranges::lower_bound(found.refs, rank, {}, &SourceRef::rank);
    if (ref == found.refs.end() || ref->rank != rank) lacks(rank);
    return *ref;
  }

  void check_equal_specs(const SourceRef& a, const SourceRef& b) const {
    if (spec(a) == spec(b)) return;
    throw Error(ErrorKind::rank_mismatch,
                fmt::format("rank {} has {}, and rank {} has {}, but both must have the same", a.rank,
                            to_string(spec(a)), b.rank, to_string(spec(b))),
                {.rank = b.rank});
  }

  [[nodiscard]] std::optional<std::pair<std::size_t, std::int64_t>> padding_of(const SourceRef& ref) const {
    const RankTensors& rank = ranks_[static_cast<std::size_t>(ref.rank)];
    const auto found = rank.padded.find(rank.tensors[ref.index].name);
    if (found == rank.padded.end()) return std::nullopt;
    return found->second;
  }

  [[nodiscard]] std::optional<std::int64_t> true_size(std::span<const SourceRef> sources,
                                                      const ResolvedMerge& resolved) const {
    const auto padding = padding_of(sources.front());
    for (const SourceRef& ref : sources)
      if (padding_of(ref) != padding)
        throw Error(ErrorKind::rank_mismatch,
                    fmt::format("rank {} and rank {} record different paddings: their shards belong to different sets",
                                sources.front().rank, ref.rank),
                    {.rank = ref.rank});
    if (resolved.true_size || !padding) return resolved.true_size;
    const auto* concat = std::get_if<merge::Concat>(&resolved.merge);
    const auto dimensions = static_cast<std::int64_t>(spec(sources.front()).shape.size());
    const std::int64_t dim = concat == nullptr ? -1 : concat->dim < 0 ? concat->dim + dimensions : concat->dim;
    if (dim != static_cast<std::int64_t>(padding->first))
      refuse_tensors(
          fmt::format("the shards split it along dimension {}, and the plan does not join that dimension. Use the plan "
                      "that the shards were made with",
                      padding->first));
    return padding->second;
  }

  static void check_results(const std::vector<ArrangedTensor>& tensors) {
    std::vector<std::string> twice;
    for (std::size_t i = 1; i < tensors.size(); ++i)
      if (tensors[i].name == tensors[i - 1].name)
        twice.push_back(fmt::format("{} (of {} and {})", tensors[i].name, tensors[i - 1].origin, tensors[i].origin));
    if (!twice.empty()) refuse_tensors(fmt::format("rules give one name to several tensors: {}", some_names(twice)));
  }

  [[nodiscard]] const std::vector<NamedSpec>& tensors_of(int rank) const {
    return ranks_[static_cast<std::size_t>(rank)].tensors;
  }
  [[nodiscard]] const TensorSpec& spec(const SourceRef& ref) const { return tensors_of(ref.rank)[ref.index].spec; }

  const MergePlan& plan_;
  ParallelLayout layout_;
  std::span<const RankTensors> ranks_;
  Extent extent_;
  std::vector<SharedName> found_;
  std::unordered_map<std::string, std::size_t> by_name_;  // indices in found_
  std::vector<std::string> shared_heads_;
  std::vector<const MergeRule*> rules_;
  std::vector<std::string> twice_;
  std::string twice_where_;
  std::string twice_advice_;
};

}  // namespace

Arrangement arrange(const MergePlan& plan, const ParallelLayout& layout, std::span<const RankTensors> ranks,
                    Extent extent) {
  return Arranging(plan, layout, ranks, extent)();
}

}  // namespace muster
