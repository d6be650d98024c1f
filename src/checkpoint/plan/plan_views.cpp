// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/plan/plan_views.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "src/checkpoint/plan/placement.hpp"
#include "src/checkpoint/plan/plan_internal.hpp"
#include "src/merge/cast.hpp"

namespace muster {
namespace {

constexpr std::int64_t most_items = 1 << 16;

[[noreturn]] void refuse_view(const std::string& words) {
  throw Error(ErrorKind::invalid_argument, words);
}

const ViewRule* view_of(const MergePlan& plan, std::string_view name) {
  const auto view = std::ranges::find_if(plan.views(), [&](const ViewRule& v) { return v.pattern.matches(name); });
  return view == plan.views().end() ? nullptr : &*view;
}

std::string with_number(std::string name, std::int64_t number) {
  const std::size_t at = name.find('#');
  return at == std::string::npos ? name : name.replace(at, 1, std::to_string(number));
}

/// A view of the plan with the values that it needs.
class Viewing {
 public:
  /// `rank` is the rank whose tensors are viewed; nullopt: in reverse.
  Viewing(const MergePlan& plan, const ViewRule& rule, int ranks, std::optional<int> rank)
      : plan_(plan),
        rule_(rule),
        ranks_(ranks),
        rank_(rank),
        where_(fmt::format("plan {}: view {}", in_quotes(plan.name()), rule.number)) {}

  struct ViewedPart {
    std::string name;
    merge::View view;
  };

  /// Returns the parts that a tensor of this shape becomes.
  [[nodiscard]] std::vector<ViewedPart> parts(std::string_view name, const Shape& shape) const {
    const std::vector<std::string> names = names_of(name);
    std::vector<ViewedPart> all;
    const auto stacked = static_cast<std::size_t>(rule_.unstack);
    if (shape.size() < stacked) refuse_view("it has no dimension to unstack");
    const std::int64_t items = element_count(Shape(shape.begin(), shape.begin() + rule_.unstack));
    if (items > most_items)
      refuse_view(fmt::format("it is a stack of {} items, and the limit is {}", items, most_items));
    take_apart(merge::View(shape), names, rule_.unstack, all);
    return all;
  }

  [[nodiscard]] std::vector<std::string> names_of(std::string_view name) const {
    if (rule_.to.empty()) return {std::string(name)};
    const auto captures = rule_.pattern.captures(name);
    std::vector<std::string> names;
    for (const auto& to : rule_.to) names.push_back(to->apply(captures.value()));
    return names;
  }

  /// In reverse: returns the shape of the whole tensor from the shapes of the parts of `items` items.
  [[nodiscard]] Shape whole_shape(std::span<const Shape> parts, std::int64_t items) const {
    Shape shape = parts.front();
    if (rule_.split) {
      const std::size_t dim = place(rule_.split->dim, shape);
      shape[dim] = 0;
      for (const Shape& part : parts.first(rule_.to.size())) shape[dim] += part.at(dim);
    }
    if (rule_.transpose && shape.size() >= 2) std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
    if (rule_.unstack != 0) shape.insert(shape.begin(), items);
    return shape;
  }

  [[nodiscard]] const std::string& where() const noexcept { return where_; }

 private:
  void take_apart(const merge::View& view, const std::vector<std::string>& names, int dimensions,
                  std::vector<ViewedPart>& all) const {
    if (dimensions == 0) return add(view, names, all);
    for (std::int64_t item = 0; item < view.shape().front(); ++item) {
      std::vector<std::string> numbered;
      numbered.reserve(names.size());
      for (const std::string& one : names) numbered.push_back(with_number(one, item));
      take_apart(view.item(item), numbered, dimensions - 1, all);
    }
  }

  void add(merge::View view, const std::vector<std::string>& names, std::vector<ViewedPart>& all) const {
    const bool is_one = element_count(view.shape()) == 1;
    if (rule_.transpose) view = view.transposed();
    for (std::size_t part = 0; part < names.size(); ++part) {
      // A scale of the whole tensor applies to each part.
      merge::View mine = rule_.split && !is_one ? split(view, part) : view;
      if (rule_.permute_rope && !is_one) mine = permuted(mine);
      all.push_back({names[part], std::move(mine)});
    }
  }

  static std::size_t place(std::int64_t dim, const Shape& shape) {
    const auto dimensions = static_cast<std::int64_t>(shape.size());
    const std::int64_t place = dim < 0 ? dim + dimensions : dim;
    if (place < 0 || place >= dimensions)
      refuse_view(fmt::format("dimension {1} is out of range for the shape {0}", to_string(shape), dim));
    return static_cast<std::size_t>(place);
  }

  /// Returns the number of heads per rank, if the model has `count`.
  [[nodiscard]] std::int64_t held_heads(const PlanNumber& heads, std::int64_t count) const {
    const std::int64_t units = head_units(plan_, heads, count, ranks_).value_or(count);
    return merge::share_heads(units, ranks_).heads * (count / units);
  }

  [[nodiscard]] merge::View split(const merge::View& view, std::size_t part) const {
    const ViewRule::Split& split = *rule_.split;
    const Shape shape = view.shape();
    const std::int64_t size = shape[place(split.dim, shape)];
    std::vector<std::int64_t> counts;
    for (const PlanNumber& count : split.counts) counts.push_back(plan_number(plan_, count, where_));
    std::int64_t groups = 1;
    const bool is_gated = split.by == ViewRule::Split::By::gated_groups;
    if (split.by == ViewRule::Split::By::heads) {
      for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = held_heads(split.counts[i], counts[i]);
    } else if (is_gated || split.by == ViewRule::Split::By::groups) {
      const std::int64_t all = *std::ranges::min_element(counts);
      for (std::int64_t& count : counts) {
        if (count % all != 0) refuse_view(fmt::format("{} heads are not a multiple of {} groups", count, all));
        count /= all;
      }
      if (rank_ && !is_gated && ranks_ > all && ranks_ % all == 0)
        return part_of_group(view, part, counts, size, static_cast<int>(ranks_ / all));
      if (all % ranks_ != 0)
        refuse_view(fmt::format("{} ranks do not divide the {} groups, which cannot be split", ranks_, all));
      groups = all / ranks_;
      if (is_gated)
        counts.front() *= 2;
      else
        refuse_gates(counts, groups, size);
    }
    const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    if (size % (total * groups) != 0)
      refuse_view(fmt::format("its size {} along dimension {} is not a multiple of {} parts of [{}]", size, split.dim,
                              groups, fmt::join(counts, ", ")));
    const std::int64_t unit = size / (total * groups);
    const std::int64_t begin =
        std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(part), std::int64_t{0});
    merge::View mine = view.slice(split.dim, std::vector{groups, total, unit}, 1, begin, counts[part]);
    if (!is_gated || part != 0) return mine;
    // In a group, the gates follow the queries; in the result, each head's gate follows the head.
    constexpr std::array<std::size_t, 4> heads_first = {0, 2, 1, 3};
    return mine.reordered(split.dim, std::vector{groups, std::int64_t{2}, counts[part] / 2, unit}, heads_first);
  }

  /// For a rank with one of `shares` equal parts of a group, cut at any position: returns the section of `part` that it
  /// has.
  [[nodiscard]] merge::View part_of_group(const merge::View& view, std::size_t part,
                                          std::span<const std::int64_t> counts, std::int64_t size, int shares) const {
    const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    if (size * shares % total != 0)
      refuse_view(fmt::format("{} ranks share a group of [{}] heads, which is not a multiple of {}", shares,
                              fmt::join(counts, ", "), size));
    const std::int64_t unit = size * shares / total;
    const std::int64_t first = *rank_ % shares * size;  // start within the group
    const std::int64_t at =
        std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(part), std::int64_t{0}) * unit -
        first;
    const std::int64_t begin = std::clamp<std::int64_t>(at, 0, size);
    const std::int64_t end = std::clamp<std::int64_t>(at + counts[part] * unit, 0, size);
    return view.slice(rule_.split->dim, std::vector{size}, 0, begin, end - begin);
  }

  /// Refuses queries with a gate each, which would be mistaken for larger heads.
  void refuse_gates(std::span<const std::int64_t> counts, std::int64_t groups, std::int64_t size) const {
    const auto head = head_size(plan_.model_config());
    const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    if (head && size == groups * (total + counts.front()) * *head)
      refuse_view(
          "it has a gate for each query head. Use \"gated_groups\" instead of \"groups\", as in the plan "
          "megatron-gated");
  }

  [[nodiscard]] merge::View permuted(const merge::View& view) const {
    const std::int64_t heads = held_heads(*rule_.permute_rope, plan_number(plan_, *rule_.permute_rope, where_));
    const Shape shape = view.shape();
    if (shape.empty() || shape.front() % (2 * heads) != 0)
      refuse_view(fmt::format("the shape {} has no {} heads of two halves", to_string(shape), heads));
    constexpr std::array<std::size_t, 3> halves_first = {0, 2, 1};
    return view.reordered(0, std::vector{heads, shape.front() / heads / 2, std::int64_t{2}}, halves_first);
  }

  const MergePlan& plan_;
  const ViewRule& rule_;
  int ranks_;
  std::optional<int> rank_;
  std::string where_;
};

}  // namespace

void cast_view(ViewedTensor& tensor, DType to) {
  const DType from = tensor.stored;
  if (std::ranges::any_of(std::array{"F8", "F6", "F4"}, [&](auto kind) { return to_string(from).starts_with(kind); }))
    refuse_view(fmt::format("{} is quantised and cannot be cast. Leave it out with --exclude", to_string(from)));
  if (from == to || merge::can_cast(from, to)) tensor.spec.dtype = to;  // integers are unchanged
}

ViewedTensor as_it_lies(const NamedSpec& tensor, std::size_t place) {
  ViewedTensor same{tensor.name, tensor.spec, tensor.spec.dtype, false, {merge::View(tensor.spec.shape).box()}};
  same.boxes.front().source = static_cast<int>(place);
  return same;
}

ViewedRank view_rank(const MergePlan& plan, const ParallelLayout& layout, RankTensors rank) {
  if (!has_views(plan)) return {std::move(rank), {}, {}};
  ViewedRank viewed{
      {{}, std::move(rank.padded), std::move(rank.heads), rank.is_ours, rank.number, std::move(rank.blocked)}, {}, {}};
  const int tensor_rank = layout.coordinates(rank.number).tensor;
  std::map<std::string, std::string> origins;
  for (std::size_t index = 0; index < rank.tensors.size(); ++index) {
    const NamedSpec& tensor = rank.tensors[index];
    std::string_view name = tensor.name;
    if (!name.starts_with(plan.at())) {
      viewed.left_out.push_back({index, 0, fmt::format("its name does not begin with {}", in_quotes(plan.at()))});
      continue;
    }
    name.remove_prefix(plan.at().size());
    const ViewRule* rule = view_of(plan, name);
    if (rule != nullptr && rule->drop) {
      viewed.left_out.push_back({index, rule->number, *rule->drop});
      continue;
    }
    try {
      std::vector<Viewing::ViewedPart> parts;
      const bool moves =
          rule != nullptr && (rule->unstack != 0 || rule->transpose || rule->split || rule->permute_rope);
      if (moves && is_packed(tensor.spec.dtype))
        refuse_view("two of its elements share a byte and cannot be separated");
      if (moves)
        parts = Viewing(plan, *rule, layout.tensor, tensor_rank).parts(name, tensor.spec.shape);
      else
        parts = {{rule == nullptr ? std::string(name)
                                  : Viewing(plan, *rule, layout.tensor, tensor_rank).names_of(name).front(),
                  merge::View(tensor.spec.shape)}};
      for (Viewing::ViewedPart& part : parts) {
        ViewedTensor view{std::move(part.name), {tensor.spec.dtype, part.view.shape()}, tensor.spec.dtype, false, {}};
        view.boxes = {part.view.box()};
        view.boxes.front().source = static_cast<int>(index);
        view.may_overflow = rule != nullptr && rule->may_overflow;
        if (rule != nullptr && rule->cast) cast_view(view, *rule->cast);
        const auto [other, is_new] = origins.emplace(view.name, tensor.name);
        if (!is_new)
          refuse_view(fmt::format("it becomes {}, as does {}", in_quotes(view.name), in_quotes(other->second)));
        viewed.tensors.tensors.push_back({view.name, view.spec});
        viewed.views.push_back(std::move(view));
      }
    } catch (const Error& error) {
      throw error.with_context(rule == nullptr ? fmt::format("tensor {}", in_quotes(tensor.name))
                                               : fmt::format("plan {}: view {}: tensor {}", in_quotes(plan.name()),
                                                             rule->number, in_quotes(tensor.name)));
    }
  }
  return viewed;
}

namespace {

/// A tensor of a rank that is assembled from its parts.
struct Fused {
  const ViewRule* rule = nullptr;
  std::map<std::int64_t, std::vector<std::size_t>> items;  // indices of the parts, by the item's number
};

constexpr std::size_t missing = SIZE_MAX;

/// Finds the origin of a part: the rank's name of the whole tensor, the item and the part.
class Turning {
 public:
  explicit Turning(const MergePlan& plan) : plan_(plan) {
    for (const ViewRule& rule : plan.views())
      for (const auto& to : rule.to) {
        if (rule.unstack == 0) continue;
        std::string glob;
        const std::string& text = to->text();
        for (std::size_t i = 0; i < text.size(); ++i) {
          const bool is_second = text[i] == '#' && glob.find('#') != std::string::npos;
          if (text[i] != '$' && !is_second) {
            glob += text[i];
            continue;
          }
          glob += '*';
          while (!is_second && i + 1 < text.size() && text[i + 1] >= '0' && text[i + 1] <= '9') ++i;
        }
        numbers_.emplace(to.get(), NumberPattern::parse(glob));
      }
  }

  struct ViewOrigin {
    std::string name;
    const ViewRule* rule = nullptr;
    std::int64_t item = 0;
    std::size_t part = 0;
  };
  [[nodiscard]] ViewOrigin operator()(const std::string& name) const {
    const ViewRule* stack_of_stacks = nullptr;
    for (const ViewRule& rule : plan_.views()) {
      for (std::size_t part = 0; part < rule.to.size(); ++part) {
        const NewName& to = *rule.to[part];
        std::int64_t item = 0;
        std::string generic = name;
        if (rule.unstack != 0) {
          const NumberPattern& pattern = numbers_.at(&to);
          const auto number = pattern.find(name);
          if (!number) continue;
          if (rule.unstack > 1) stack_of_stacks = &rule;
          if (rule.unstack > 1) continue;
          item = *number;
          generic = hashed(pattern, name, item);
        }
        if (!to.fits(generic)) continue;
        std::string old;
        try {
          old = to.old_name(generic);
        } catch (const Error& error) {
          throw error.with_context(fmt::format("plan {}: view {}, which names the tensor {}, is not invertible",
                                               in_quotes(plan_.name()), rule.number, in_quotes(name)));
        }
        if (view_of(plan_, old) != &rule) continue;
        if (with_number(to.apply(rule.pattern.captures(old).value()), item) == name) return {old, &rule, item, part};
      }
    }
    if (stack_of_stacks != nullptr)
      refuse_view(
          fmt::format("plan {}: view {}, which names the tensor {}, is not invertible: it unstacks two dimensions",
                      in_quotes(plan_.name()), stack_of_stacks->number, in_quotes(name)));
    const ViewRule* rule = view_of(plan_, name);
    if (rule != nullptr && !rule->to.empty())
      refuse_view(fmt::format("plan {}: view {} is not invertible: it matches the tensor {} of the model itself",
                              in_quotes(plan_.name()), rule->number, in_quotes(name)));
    return {name, rule, 0, 0};
  }

 private:
  /// Returns the name with "#" in place of its number.
  static std::string hashed(const NumberPattern& pattern, const std::string& name, std::int64_t number) {
    const std::string other = pattern.replace(name, number == 0 ? 1 : 0);
    const auto differ = std::ranges::mismatch(name, other);
    const auto at = static_cast<std::size_t>(differ.in1 - name.begin());
    std::string text = name;
    return text.replace(at, std::to_string(number).size(), "#");
  }

  const MergePlan& plan_;
  std::map<const NewName*, NumberPattern> numbers_;
};

ViewedTensor fused_tensor(const MergePlan& plan, const ParallelLayout& layout, const std::string& name,
                          const Fused& fused, std::span<const NamedSpec> tensors) {
  const ViewRule& rule = *fused.rule;
  if (rule.drop) refuse_view("the view drops it");
  if (rule.cast) refuse_view("a cast is not invertible. Remove \"cast\" from a plan for shards");
  std::vector<Shape> shapes;
  std::vector<std::size_t> places;
  std::int64_t next = 0;
  for (const auto& [item, parts] : fused.items) {
    if (item != next++) refuse_view(fmt::format("item {} is missing, and item {} exists", next - 1, item));
    for (std::size_t part = 0; part < parts.size(); ++part) {
      if (parts[part] == missing) {
        const std::string lacking = rule.to[part]->text();
        refuse_view(fmt::format("its part {} is missing", in_quotes(lacking)));
      }
      places.push_back(parts[part]);
      shapes.push_back(tensors[parts[part]].spec.shape);
    }
  }
  const DType dtype = tensors[places.front()].spec.dtype;
  for (const std::size_t place : places)
    if (tensors[place].spec.dtype != dtype)
      refuse_view(fmt::format("its parts {} and {} have different dtypes", in_quotes(tensors[places.front()].name),
                              in_quotes(tensors[place].name)));
  if (rule.split && element_count(shapes.front()) == 1)
    refuse_view("each part has a scale of one element, and the whole tensor would need a common one");
  const Viewing viewing(plan, rule, layout.tensor, std::nullopt);
  const Shape whole = viewing.whole_shape(shapes, static_cast<std::int64_t>(fused.items.size()));
  const std::vector<Viewing::ViewedPart> parts = viewing.parts(name, whole);
  ViewedTensor tensor{plan.at() + name, {dtype, whole}, dtype, false, {}};
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (parts[i].view.shape() != shapes[i])
      refuse_view(fmt::format("its part {} is {}, expected {}", in_quotes(tensors[places[i]].name),
                              to_string(shapes[i]), to_string(parts[i].view.shape())));
    merge::StridedBox box = merge::reversed(parts[i].view.box());
    box.source = static_cast<int>(places[i]);
    tensor.boxes.push_back(std::move(box));
  }
  return tensor;
}

}  // namespace

std::vector<ViewedTensor> unview_rank(const MergePlan& plan, const ParallelLayout& layout,
                                      std::span<const NamedSpec> tensors) {
  const Turning turn(plan);
  std::vector<std::string> order;
  std::map<std::string, Fused> wholes;
  for (std::size_t place = 0; place < tensors.size(); ++place) {
    const Turning::ViewOrigin origin = turn(tensors[place].name);
    const auto [whole, is_new] = wholes.try_emplace(origin.name);
    if (is_new) order.push_back(origin.name);
    whole->second.rule = origin.rule;
    const std::size_t parts = origin.rule == nullptr || origin.rule->to.empty() ? 1 : origin.rule->to.size();
    std::vector<std::size_t>& item = whole->second.items.try_emplace(origin.item, parts, missing).first->second;
    if (item[origin.part] != missing)
      refuse_view(fmt::format("the plan maps {} and {} to one tensor of a rank",
                              in_quotes(tensors[item[origin.part]].name), in_quotes(tensors[place].name)));
    item[origin.part] = place;
  }
  std::vector<ViewedTensor> all;
  for (const std::string& name : order) {
    const Fused& fused = wholes.at(name);
    if (fused.rule == nullptr) {
      const std::size_t place = fused.items.begin()->second.front();
      all.push_back(as_it_lies({plan.at() + name, tensors[place].spec}, place));
      continue;
    }
    try {
      all.push_back(fused_tensor(plan, layout, name, fused, tensors));
    } catch (const Error& error) {
      throw error.with_context(fmt::format("plan {}: inverse of view {}: tensor {}", in_quotes(plan.name()),
                                           fused.rule->number, in_quotes(name)));
    }
  }
  return all;
}

std::vector<std::vector<ViewedTensor>> views_by_process(std::span<const std::vector<ViewedTensor>> views,
                                                        std::span<const std::size_t> counts, int processes) {
  std::vector<std::vector<ViewedTensor>> all(static_cast<std::size_t>(processes));
  const std::vector<RankSources> firsts = sources_by_rank(counts, processes);
  for (std::size_t rank = 0; rank < views.size(); ++rank)
    for (const ViewedTensor& view : views[rank]) {
      ViewedTensor& added = all[static_cast<std::size_t>(firsts[rank].process)].emplace_back(view);
      for (merge::StridedBox& box : added.boxes) box.source += static_cast<int>(firsts[rank].first);
    }
  return all;
}

}  // namespace muster
