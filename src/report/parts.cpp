// SPDX-License-Identifier: Apache-2.0
// The parts of tensors that ranks have, for the drawing of a layout.

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "src/checkpoint/assembly/shard_job.hpp"
#include "src/inspect/output.hpp"
#include "src/merge/reduce.hpp"
#include "src/report/rows.hpp"
#include "src/report/sections.hpp"

namespace muster::report {
namespace {

/// Units [from, to) along the dimension of the cut.
struct HeldRange {
  int rank = 0;
  std::int64_t from = 0;
  std::int64_t to = 0;
  friend auto operator<=>(const HeldRange&, const HeldRange&) = default;
};

struct PartedTensor {
  Shape shape = {};
  std::optional<std::size_t> dim = {};  ///< nullopt: it is not cut
  std::int64_t units = 1;
  merge::Combine combine = merge::Combine::copy;
  std::vector<HeldRange> held = {};
  friend auto operator<=>(const PartedTensor&, const PartedTensor&) = default;
};

/// Returns the dimension with this many units and this many elements per unit.
std::optional<std::size_t> dimension_of(const Shape& shape, const merge::Grain& grain, std::int64_t units) {
  std::int64_t rows = 1;
  for (std::size_t dim = 0; dim < shape.size(); rows *= shape[dim++])
    if (rows == grain.rows && shape[dim] == units) return dim;
  return std::nullopt;
}

/// Joins ranges of a rank that touch each other, and sorts them.
void tidy(PartedTensor& tensor) {
  std::ranges::sort(tensor.held);
  std::vector<HeldRange> joined;
  for (const HeldRange& range : tensor.held) {
    if (!joined.empty() && joined.back().rank == range.rank && range.from <= joined.back().to)
      joined.back().to = std::max(joined.back().to, range.to);
    else
      joined.push_back(range);
  }
  tensor.held = std::move(joined);
}

/// Tensors with equal parts, whose names differ only in numbers.
class PartGroups {
 public:
  void add(std::string_view name, PartedTensor tensor) {
    tidy(tensor);
    const auto [found, is_new] = known_.try_emplace({name_pattern(name, 0), std::move(tensor)}, counts_.size());
    if (is_new) {
      counts_.push_back(0);
      names_.emplace_back(name);
      order_.push_back(found);
    }
    ++counts_[found->second];
  }

  /// A tensor whose parts are not ranges along one dimension is only counted.
  void leave_out() { ++left_out_; }

  /// Adds "groups", "groups_left_out" and "tensors_left_out".
  void add_to(Config& parts) const {
    ConfigArray groups;
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const auto& [pattern, tensor] = order_[i]->first;
      groups.push_back(
          Config::object({{"name", counts_[i] == 1 ? names_[i] : pattern},
                          {"tensors", counts_[i]},
                          {"shape", inspect::extents_of(tensor.shape)},
                          {"dim", tensor.dim ? Config(*tensor.dim) : Config()},
                          {"units", tensor.units},
                          {"combine", merge::name_of(tensor.combine)},
                          {"held", inspect::list_of(tensor.held, [](const HeldRange& range) {
                             return Config::object({{"rank", range.rank}, {"from", range.from}, {"to", range.to}});
                           })}}));
    }
    parts["groups"] = std::move(groups);
    limit_list(parts, "groups");
    parts["tensors_left_out"] = left_out_;
  }

 private:
  using Known = std::map<std::pair<std::string, PartedTensor>, std::size_t>;
  Known known_;
  std::vector<Known::const_iterator> order_;
  std::vector<std::string> names_;  ///< of the first tensor
  std::vector<std::size_t> counts_;
  std::size_t left_out_ = 0;
};

/// Returns the parts of a tensor that is joined from those of ranks. `equal_sets` are those of its source.
PartedTensor joined(const MergedTensor& tensor, const std::vector<std::vector<SourceRef>>& equal_sets) {
  const merge::Layout& layout = tensor.layout;
  const auto rank_of = [&](int source) { return tensor.sources[static_cast<std::size_t>(source)].rank; };
  PartedTensor parted{.shape = layout.target.shape, .units = layout.target_units, .combine = layout.combine};
  for (const merge::UnitRange& piece : layout.pieces)
    parted.held.push_back({rank_of(piece.source), piece.at, piece.at + piece.count});
  for (const int source : layout.must_equal) parted.held.push_back({rank_of(source), 0, layout.target_units});
  for (const merge::Copy& copy : layout.copies)
    for (const merge::UnitRange& piece : layout.pieces) {
      if (piece.source != copy.source) continue;
      const std::int64_t begin = std::max(copy.begin, piece.begin);
      const std::int64_t end = std::min(copy.begin + copy.count, piece.begin + piece.count);
      if (begin < end)
        parted.held.push_back({rank_of(copy.other), piece.at + begin - piece.begin, piece.at + end - piece.begin});
    }
  // The ranks of a set have copies of the same tensor, and the layout names only one of them.
  for (const std::uint32_t number : tensor.equal)
    for (std::size_t source = 0; source < tensor.sources.size(); ++source) {
      const std::vector<SourceRef>& set = equal_sets[number];
      if (std::ranges::find(set, tensor.sources[source]) == set.end()) continue;
      for (const merge::UnitRange& piece : layout.pieces)
        if (piece.source == static_cast<int>(source))
          for (const SourceRef& other : set) parted.held.push_back({other.rank, piece.at, piece.at + piece.count});
    }
  const bool is_cut =
      std::ranges::any_of(parted.held, [&](const HeldRange& range) { return range.to - range.from != parted.units; });
  if (is_cut) parted.dim = dimension_of(parted.shape, layout.grain, parted.units);
  return parted;
}

}  // namespace

std::optional<Config> joined_parts(const TensorSource& source, const std::unordered_set<std::string_view>& names) {
  const auto* merged = dynamic_cast<const MergedTensors*>(&source);
  if (merged == nullptr) return std::nullopt;
  PartGroups groups;
  for (const MergedTensor& tensor : merged->merged()) {
    if (!names.contains(tensor.name)) continue;
    if (tensor.layout.bands.empty())
      groups.add(tensor.name, joined(tensor, merged->equal_sets()));
    else
      groups.leave_out();  // boxes have positions in several dimensions
  }
  Config parts = Config::object({{"direction", "joined"}});
  groups.add_to(parts);
  return parts;
}

Config cut_parts(SourceOptions request, const std::string& path, const ParallelLayout& layout,
                 const std::unordered_set<std::string_view>& names) {
  request.path = path;
  request.target_layout = layout;
  const ShardJob job(request);
  std::map<std::size_t, PartedTensor> whole;  // by the index of the whole tensor
  Config tree = Config::object(
      {{"direction", "cut"}, {"layout", to_string(layout)}, {"plan", job.plan.name()}, {"ranks", layout.ranks()}});
  const std::vector<TensorEntry>& entries = job.model->tensors();
  for (std::size_t rank = 0; rank < job.outputs.files.size(); ++rank)
    for (const MergedTensor& tensor : job.outputs.files[rank].tensors) {
      if (job.viewed != nullptr || tensor.sources.empty()) continue;
      const std::size_t index = tensor.sources.front().index;
      if (!names.contains(entries[index].name)) continue;
      PartedTensor& parted = whole[index];
      const std::int64_t units = tensor.layout.source_units.front();
      parted.shape = entries[index].shape;
      parted.units = std::max(parted.units, units);
      for (const merge::UnitRange& piece : tensor.layout.pieces) {
        parted.held.push_back({static_cast<int>(rank), piece.begin, piece.begin + piece.count});
        if (piece.count != units) parted.dim = dimension_of(parted.shape, tensor.layout.grain, units);
      }
    }
  PartGroups groups;
  for (std::size_t index = 0; index < entries.size(); ++index) {
    const auto found = whole.find(index);
    if (found != whole.end())
      groups.add(entries[index].name, std::move(found->second));
    else if (names.contains(entries[index].name))
      groups.leave_out();  // a plan with views joins parts of several tensors
  }
  groups.add_to(tree);
  return tree;
}

}  // namespace muster::report
