// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/merge_layout.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_map>

#include "muster/error.hpp"
#include "src/checkpoint/quoted.hpp"

namespace muster {
namespace {

constexpr std::size_t most_names = 10;

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::argument, words);
}

std::string describe(const TensorSpec& spec) {
  return fmt::format("{} {}", to_string(spec.dtype), to_string(spec.shape));
}

std::string not_matched(const MergePlan& plan, std::vector<std::string_view> names) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  std::string list;
  for (std::size_t i = 0; i < std::min(names.size(), most_names); ++i) {
    list += (i == 0 ? "" : ", ") + in_quotes(names[i]);
  }
  if (names.size() > most_names) list += fmt::format(" and {} more", names.size() - most_names);
  return fmt::format("plan {}: no rule matches the tensor{} {}; add one, or take another plan", in_quotes(plan.name()),
                     names.size() == 1 ? "" : "s", list);
}

std::size_t dimension(const ConcatAction& rule, std::string_view name, const Shape& shape) {
  const auto dimensions = static_cast<std::int64_t>(shape.size());
  const std::int64_t dim = rule.dim < 0 ? rule.dim + dimensions : rule.dim;
  if (dim < 0 || dim >= dimensions) {
    refuse(
        fmt::format("tensor {} of shape {} has no dimension {} to concatenate along; the plan does not fit this model",
                    in_quotes(name), to_string(shape), rule.dim));
  }
  return static_cast<std::size_t>(dim);
}

// One merged name and where it comes from.
struct Sources {
  std::string_view name;
  std::vector<const TensorSpec*> ranks;  // null: that rank has none
};

const TensorSpec& first_of_all(const Sources& sources) {
  for (std::size_t rank = 0; rank < sources.ranks.size(); ++rank) {
    if (sources.ranks[rank] == nullptr) {
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("tensor {}: rank {} of {} does not have it; its shard is of another model or cut with "
                              "another plan",
                              in_quotes(sources.name), rank, sources.ranks.size()),
                  {.rank = static_cast<int>(rank)});
    }
  }
  return *sources.ranks.front();
}

[[noreturn]] void refuse_shapes(const Sources& sources, std::size_t rank, std::string_view wanted) {
  throw Error(ErrorKind::rank_mismatch,
              fmt::format("tensor {}: rank 0 has {}, rank {} has {}; {}", in_quotes(sources.name),
                          describe(*sources.ranks.front()), rank, describe(*sources.ranks[rank]), wanted),
              {.rank = static_cast<int>(rank)});
}

std::int64_t extent(const Shape& shape, std::size_t dim) {
  return shape.empty() ? 1 : shape[dim];
}

struct Merging {
  const Sources& sources;
  const PaddedSizes& padded;

  MergedTensor operator()(const ConcatAction& rule) const {
    const TensorSpec& first = first_of_all(sources);
    MergedTensor merged{std::string(sources.name), first, dimension(rule, sources.name, first.shape), {}, {}};
    const auto total = check_and_add(merged.dim);
    const std::int64_t size = true_size(merged.dim, total);
    merged.whole.shape[merged.dim] = size;
    element_count(merged.whole.shape);
    std::int64_t at = 0;
    for (std::size_t rank = 0; rank < sources.ranks.size() && at < size; ++rank) {
      const std::int64_t count = std::min(sources.ranks[rank]->shape[merged.dim], size - at);
      if (count > 0) merged.pieces.push_back({static_cast<int>(rank), 0, count, at});
      at += count;
    }
    return merged;
  }

  MergedTensor operator()(const Same&) const {
    MergedTensor merged = whole_of_first(first_of_all(sources));
    for (std::size_t rank = 1; rank < sources.ranks.size(); ++rank) {
      const TensorSpec& other = *sources.ranks[rank];
      if (other.dtype != merged.whole.dtype || other.shape != merged.whole.shape) {
        refuse_shapes(sources, rank, "the rule \"same\" wants them equal");
      }
      merged.must_equal.push_back(static_cast<int>(rank));
    }
    return merged;
  }

  MergedTensor operator()(const First&) const {
    if (sources.ranks.front() == nullptr) {
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("tensor {}: rank 0 does not have it, and the rule \"first\" takes rank 0's",
                              in_quotes(sources.name)),
                  {.rank = 0});
    }
    return whole_of_first(*sources.ranks.front());
  }

  template <class Action>
  MergedTensor operator()(const Action& action) const {
    throw Error(ErrorKind::unsupported, fmt::format("the action \"{}\" is not known here", action_name(action)));
  }

 private:
  [[nodiscard]] MergedTensor whole_of_first(const TensorSpec& first) const {
    return {std::string(sources.name), first, 0, {{0, 0, extent(first.shape, 0), 0}}, {}};
  }

  [[nodiscard]] std::int64_t check_and_add(std::size_t dim) const {
    const TensorSpec& first = *sources.ranks.front();
    std::int64_t total = 0;
    for (std::size_t rank = 0; rank < sources.ranks.size(); ++rank) {
      const TensorSpec& other = *sources.ranks[rank];
      bool fits = other.dtype == first.dtype && other.shape.size() == first.shape.size();
      for (std::size_t d = 0; fits && d < first.shape.size(); ++d) fits = d == dim || other.shape[d] == first.shape[d];
      if (!fits)
        refuse_shapes(sources, rank, fmt::format("the rule \"concat\" lets them differ in dimension {} only", dim));
      if (__builtin_add_overflow(total, other.shape[dim], &total)) {
        refuse(fmt::format("tensor {}: the ranks' sizes along dimension {} add up to more than 63 bits",
                           in_quotes(sources.name), dim));
      }
    }
    return total;
  }

  [[nodiscard]] std::int64_t true_size(std::size_t dim, std::int64_t total) const {
    const auto found = padded.find(sources.name);
    if (found == padded.end()) return total;
    const auto [padded_dim, size] = found->second;
    if (padded_dim != dim) {
      refuse(
          fmt::format("tensor {} was cut along dimension {}, the plan joins dimension {}; take the plan that it was "
                      "cut with",
                      in_quotes(sources.name), padded_dim, dim));
    }
    if (size < 0 || size > total) {
      refuse(fmt::format("tensor {}: the shards say that its size along dimension {} is {}, but have {}",
                         in_quotes(sources.name), dim, size, total));
    }
    return size;
  }
};

struct Split {
  const NamedSpec& tensor;
  int ranks;

  SplitTensor operator()(const ConcatAction& rule) const {
    SplitTensor split{tensor.spec, dimension(rule, tensor.name, tensor.spec.shape), {}, false};
    const std::int64_t size = tensor.spec.shape[split.dim];
    std::int64_t slice = size / ranks + (size % ranks == 0 ? 0 : 1);
    // Two packed elements share a byte: a slice may not end inside one.
    if (is_packed(tensor.spec.dtype) && inner_elements(split.dim) % 2 != 0) slice += slice % 2;
    split.shard.shape[split.dim] = slice;
    split.padded = slice * ranks != size;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::int64_t at = std::min(size, slice * rank);
      split.pieces.push_back({rank, 0, std::min(slice, size - at), at});
    }
    return split;
  }

  SplitTensor operator()(const Same&) const {
    SplitTensor split{tensor.spec, 0, {}, false};
    for (int rank = 0; rank < ranks; ++rank) split.pieces.push_back({rank, 0, extent(tensor.spec.shape, 0), 0});
    return split;
  }

  SplitTensor operator()(const First&) const {
    refuse(fmt::format("tensor {}: the rule \"first\" has no way back, so it cannot be cut into shards; use \"same\"",
                       in_quotes(tensor.name)));
  }

  template <class Action>
  SplitTensor operator()(const Action& action) const {
    throw Error(ErrorKind::unsupported, fmt::format("the action \"{}\" is not known here", action_name(action)));
  }

 private:
  [[nodiscard]] std::int64_t inner_elements(std::size_t dim) const {
    std::int64_t count = 1;
    for (std::size_t d = dim + 1; d < tensor.spec.shape.size(); ++d) count *= tensor.spec.shape[d];
    return count;
  }
};

}  // namespace

std::vector<MergedTensor> merge_layout(const MergePlan& plan, std::span<const std::vector<NamedSpec>> ranks,
                                       const PaddedSizes& padded) {
  std::vector<Sources> all;
  std::unordered_map<std::string_view, std::size_t> position;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const NamedSpec& tensor : ranks[rank]) {
      const auto [entry, fresh] = position.try_emplace(tensor.name, all.size());
      if (fresh) all.push_back({tensor.name, std::vector<const TensorSpec*>(ranks.size())});
      const TensorSpec*& source = all[entry->second].ranks[rank];
      if (source != nullptr) {
        refuse(fmt::format("tensor {}: rank {} has two sources for this one name", in_quotes(tensor.name), rank));
      }
      source = &tensor.spec;
    }
  }
  std::sort(all.begin(), all.end(), [](const Sources& a, const Sources& b) { return a.name < b.name; });

  std::vector<const MergeRule*> rules;
  std::vector<std::string_view> unmatched;
  rules.reserve(all.size());
  for (const Sources& sources : all) {
    rules.push_back(plan.find(sources.name));
    if (rules.back() == nullptr) unmatched.push_back(sources.name);
  }
  if (!unmatched.empty()) refuse(not_matched(plan, unmatched));

  std::vector<MergedTensor> merged;
  merged.reserve(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) merged.push_back(std::visit(Merging{all[i], padded}, rules[i]->action));
  return merged;
}

SplitTensor split_layout(const MergePlan& plan, const NamedSpec& tensor, int ranks) {
  const MergeRule* rule = plan.find(tensor.name);
  if (rule == nullptr) refuse(not_matched(plan, {tensor.name}));
  return std::visit(Split{tensor, ranks}, rule->action);
}

void check_rules(const MergePlan& plan, std::span<const NamedSpec> tensors) {
  std::vector<std::string_view> unmatched;
  for (const NamedSpec& tensor : tensors) {
    if (plan.find(tensor.name) == nullptr) unmatched.push_back(tensor.name);
  }
  if (!unmatched.empty()) refuse(not_matched(plan, unmatched));
}

}  // namespace muster
