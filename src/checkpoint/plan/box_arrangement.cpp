// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/plan/box_arrangement.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/merge/boxes.hpp"

namespace muster {
namespace {

/// All parts of one tensor, in the order of ranks.
struct WholeParts {
  std::string name;
  std::vector<SourceRef> refs;
};

/// The parts that have the same elements.
struct Replicas {
  merge::OwnedBox box;
  std::vector<SourceRef> refs;
  SourceRef used;  // one of them
};

class ArrangingBoxes {
 public:
  ArrangingBoxes(const MergePlan& plan, std::span<const RankTensors> ranks, const BoxOptions& options)
      : plan_(plan), ranks_(ranks), options_(options), load_(ranks.size()) {}

  Arrangement operator()() {
    collect();
    std::ranges::sort(wholes_, natural_less, &WholeParts::name);
    std::vector<std::vector<Replicas>> replicas;
    for (const WholeParts& whole : wholes_) replicas.push_back(replicas_of(whole));
    // Parts without replicas first, so that the choice among replicas can even out the load.
    for (const bool is_choice : {false, true})
      for (auto& tensor : replicas)
        for (Replicas& each : tensor)
          if ((each.refs.size() > 1) == is_choice) choose(each);
    Arrangement result;
    for (std::size_t i = 0; i < wholes_.size(); ++i) {
      try {
        result.tensors.push_back(joined(wholes_[i], replicas[i]));
      } catch (const Error& error) {
        throw error.with_context(fmt::format("tensor {}", in_quotes(wholes_[i].name)));
      }
    }
    return result;
  }

 private:
  void collect() {
    std::unordered_map<std::string_view, std::size_t> by_name;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const std::vector<NamedSpec>& tensors = ranks_[rank].tensors;
      for (std::uint32_t index = 0; index < tensors.size(); ++index) {
        const auto [at, is_new] = by_name.try_emplace(tensors[index].name, wholes_.size());
        if (is_new) wholes_.push_back({tensors[index].name, {}});
        wholes_[at->second].refs.push_back({static_cast<int>(rank), index});
      }
    }
  }

  [[nodiscard]] const RankTensors& rank_of(const SourceRef& ref) const {
    return ranks_[static_cast<std::size_t>(ref.rank)];
  }
  [[nodiscard]] TensorSpec whole_of(const SourceRef& ref) const {
    return {rank_of(ref).tensors[ref.index].spec.dtype, rank_of(ref).places[ref.index].whole};
  }
  [[nodiscard]] merge::OwnedBox box_of(const SourceRef& ref) const {
    return {rank_of(ref).places[ref.index].offset, rank_of(ref).tensors[ref.index].spec.shape};
  }

  [[nodiscard]] std::vector<Replicas> replicas_of(const WholeParts& whole) const {
    std::map<std::pair<Shape, Shape>, std::size_t> by_box;
    std::vector<Replicas> all;
    const TensorSpec first = whole_of(whole.refs.front());
    for (const SourceRef& ref : whole.refs) {
      if (const TensorSpec spec = whole_of(ref); spec != first)
        throw Error(
            ErrorKind::rank_mismatch,
            fmt::format("tensor {}: it is {} on rank {}, and {} on rank {}. Pass the same dtype and whole shape "
                        "on all ranks",
                        in_quotes(whole.name), to_string(first), whole.refs.front().rank, to_string(spec), ref.rank),
            {.rank = ref.rank});
      merge::OwnedBox box = box_of(ref);
      const auto [at, is_new] = by_box.try_emplace({box.begin, box.extents}, all.size());
      if (is_new) all.push_back({std::move(box), {}, {}});
      all[at->second].refs.push_back(ref);
    }
    return all;
  }

  void choose(Replicas& replicas) {
    const auto load_of = [&](const SourceRef& ref) { return load_[static_cast<std::size_t>(ref.rank)]; };
    replicas.used =
        options_.is_balanced ? *std::ranges::min_element(replicas.refs, {}, load_of) : replicas.refs.front();
    const TensorSpec& spec = rank_of(replicas.used).tensors[replicas.used.index].spec;
    load_[static_cast<std::size_t>(replicas.used.rank)] += byte_size(spec.dtype, spec.shape);
  }

  ArrangedTensor joined(const WholeParts& whole, const std::vector<Replicas>& replicas) const {
    ArrangedTensor tensor{whole.name, whole.name, plan_.find(whole.name), {}, {}, {}, {}};
    merge::Layout& layout = tensor.layout;
    layout.target = whole_of(whole.refs.front());
    layout.target_units = element_count(layout.target.shape);
    std::vector<merge::SourceBox> boxes;
    std::vector<merge::BoxView> views;
    for (const Replicas& each : replicas) {
      const bool is_empty = merge::volume(each.box.extents) == 0;
      for (const SourceRef& ref : each.refs)
        if (is_empty || ref != each.used) tensor.unused.push_back(ref);
      if (is_empty) continue;
      boxes.push_back({static_cast<int>(tensor.sources.size()), each.box, each.box});
      views.push_back(each.box.view());
      tensor.sources.push_back(each.used);
      layout.source_units.push_back(static_cast<std::int64_t>(merge::volume(each.box.extents)));
      if (options_.check_replicas && each.refs.size() > 1) tensor.equal.push_back(each.refs);
    }
    const merge::Cover cover = merge::cover_of(views, SIZE_MAX);
    if (!cover.is_known)
      throw Error(ErrorKind::unsupported, "it has too many parts to check for overlaps. Pass fewer parts");
    std::uint64_t covered = cover.elements;
    if (!cover.overlaps.empty()) {
      std::vector<merge::CommonBox> common;
      boxes = merge::cut_overlaps(std::move(boxes), cover.overlaps, common);
      covered = 0;
      for (const merge::SourceBox& box : boxes) covered += merge::volume(box.box.extents);
      if (options_.check_replicas) compare(common, tensor);
    }
    if (covered != static_cast<std::uint64_t>(layout.target_units)) refuse_holes(whole, layout.target, covered);
    layout.bands = merge::bands_of(layout.target, boxes);
    return tensor;
  }

  /// Adds the comparisons of elements that boxes of different sizes have in common.
  void compare(std::span<const merge::CommonBox> common, ArrangedTensor& tensor) const {
    const auto rows_of = [&](int source, const merge::OwnedBox& box) {
      const SourceRef& ref = tensor.sources[static_cast<std::size_t>(source)];
      return merge::rows_in_source(tensor.layout.target, box, box_of(ref));
    };
    for (const merge::CommonBox& each : common) {
      const std::vector<merge::Rectangle> one = rows_of(each.source, each.box);
      const std::vector<merge::Rectangle> other = rows_of(each.other, each.box);
      for (std::size_t i = 0; i < one.size(); ++i) {
        auto& set = tensor.equal.emplace_back();
        for (const auto& [source, rows] : {std::pair(each.source, one[i]), std::pair(each.other, other[i])}) {
          SourceRef ref = tensor.sources[static_cast<std::size_t>(source)];
          ref.begin = rows.from;
          ref.bytes = rows.bytes;
          ref.rows = rows.rows;
          ref.stride = rows.from_stride;
          set.push_back(ref);
        }
      }
    }
  }

  [[noreturn]] static void refuse_holes(const WholeParts& whole, const TensorSpec& target, std::uint64_t covered) {
    std::set<int> ranks;
    for (const SourceRef& ref : whole.refs) ranks.insert(ref.rank);
    throw Error(ErrorKind::invalid_argument,
                fmt::format("its parts have {} of {} elements of {}; parts come from rank {}. Pass every element on at "
                            "least one rank",
                            covered, element_count(target.shape), to_string(target.shape), fmt::join(ranks, ", ")));
  }

  const MergePlan& plan_;
  std::span<const RankTensors> ranks_;
  BoxOptions options_;
  std::vector<std::uint64_t> load_;  // bytes of each rank that are used
  std::vector<WholeParts> wholes_;
};

}  // namespace

MergePlan plan_of_boxes(const Config* model_config) {
  return MergePlan::parse(R"({"muster_plan": 1, "rules": [{"match": "*", "action": "same"}]})",
                          std::string(by_boxes_name), model_config);
}

Arrangement arrange_boxes(const MergePlan& plan, std::span<const RankTensors> ranks, const BoxOptions& options) {
  return ArrangingBoxes(plan, ranks, options)();
}

}  // namespace muster
