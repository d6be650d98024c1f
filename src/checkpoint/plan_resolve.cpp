// SPDX-License-Identifier: Apache-2.0
// Rules for tensors whose shapes are known: numbers of config.json are looked up, scales become what their shapes say.

#include <fmt/format.h>

#include <algorithm>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/plan_json.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

const Config* look_up(const Config& config, std::string_view path) {
  const Config* at = &config;
  while (at != nullptr) {
    if (!at->is_object()) return nullptr;
    // A key with a dot in it counts before the path that it looks like.
    if (const Config* whole = at->as_object().find(path)) return whole;
    const std::size_t dot = path.find('.');
    if (dot == std::string_view::npos) return nullptr;
    at = at->as_object().find(path.substr(0, dot));
    path.remove_prefix(dot + 1);
  }
  return nullptr;
}

std::optional<std::int64_t> size_along(const TensorSpec& spec, std::int64_t dim) {
  const auto dimensions = static_cast<std::int64_t>(spec.shape.size());
  if (dim < 0) dim += dimensions;
  if (dim < 0 || dim >= dimensions) return std::nullopt;
  return spec.shape[static_cast<std::size_t>(dim)];
}

class Resolver {
 public:
  Resolver(const MergePlan& plan, const Config& config, const MergeRule& rule, std::string_view tensor,
           std::span<const TensorSpec> specs, bool whole)
      : plan_(plan), config_(config), rule_(rule), tensor_(tensor), specs_(specs), whole_(whole) {}

  ResolvedMerge operator()(const ConcatAction& action) const {
    ResolvedMerge resolved{Concat{action.dim, numbers(action.blocks)}};
    if (action.trim) {
      resolved.true_size = number(*action.trim);
      // Backwards the whole has no padding: what it has more would be lost on the way to the ranks and back.
      const std::optional<std::int64_t> size = whole_ ? size_along(specs_.front(), action.dim) : std::nullopt;
      if (size && *size != *resolved.true_size) {
        throw Error(ErrorKind::argument,
                    fmt::format("{} says that the true size of the tensor {} along dimension {} is {}, and it is {}",
                                where(), in_quotes(tensor_), action.dim, *resolved.true_size, *size));
      }
    }
    return resolved;
  }
  ResolvedMerge operator()(const ScaleAction& action) const {
    const auto is_one = [](const TensorSpec& spec) { return element_count(spec.shape) == 1; };
    if (std::all_of(specs_.begin(), specs_.end(), is_one)) return {whole_ ? same() : max()};
    const bool is_cut = action.dim && std::any_of(specs_.begin(), specs_.end(), [&](const TensorSpec& spec) {
                          return size_along(spec, *action.dim).value_or(1) > 1;
                        });
    if (!is_cut) return {same()};
    return {Concat{*action.dim, numbers(action.blocks)}};
  }
  ResolvedMerge operator()(const DropAction&) const {
    throw Error(ErrorKind::argument, where() + " drops the tensor, so there is nothing to merge");
  }
  template <class Plain>
  ResolvedMerge operator()(const Plain& action) const {
    return {action};
  }

 private:
  [[nodiscard]] std::string where() const {
    return fmt::format("plan {}: rule {}", in_quotes(plan_.name()), rule_.number);
  }

  [[nodiscard]] std::int64_t number(const PlanNumber& number) const {
    if (number.key.empty()) return number.value;
    const Config* found = look_up(config_, number.key);
    if (found == nullptr || found->is_null()) {
      throw Error(ErrorKind::argument,
                  fmt::format("{} needs {} of config.json, which {}", where(), in_quotes(number.key),
                              config_.is_null() ? "is not there" : "does not have it"));
    }
    if (found->type() != Config::Type::integer || found->as_int() < 1 || found->as_int() > largest_plan_number) {
      throw Error(ErrorKind::argument, fmt::format("{} needs {} of config.json, which is no integer from 1 to {} there",
                                                   where(), in_quotes(number.key), largest_plan_number));
    }
    return found->as_int();
  }
  [[nodiscard]] std::vector<std::int64_t> numbers(const std::vector<PlanNumber>& of) const {
    std::vector<std::int64_t> values;
    values.reserve(of.size());
    for (const PlanNumber& n : of) values.push_back(number(n));
    return values;
  }

  const MergePlan& plan_;
  const Config& config_;
  const MergeRule& rule_;
  std::string_view tensor_;
  std::span<const TensorSpec> specs_;
  bool whole_;
};

}  // namespace

ResolvedMerge MergePlan::resolve(const MergeRule& rule, std::string_view tensor, std::span<const TensorSpec> specs,
                                 bool whole) const {
  if (specs.empty()) {
    throw Error(ErrorKind::argument, fmt::format("plan {}: resolving rule {} for the tensor {}: no rank has it",
                                                 in_quotes(name_), rule.number, in_quotes(tensor)));
  }
  if (rule.across == Axis::expert && experts_ && experts_->pattern.find(tensor)) {
    throw Error(ErrorKind::argument,
                fmt::format("plan {}: rule {} joins the tensor {} across expert ranks, but by \"experts\" ({}) it "
                            "belongs to one expert and so to one of them; take one of the two out",
                            in_quotes(name_), rule.number, in_quotes(tensor), in_quotes(experts_->pattern.text())));
  }
  return std::visit(Resolver(*this, model_config_, rule, tensor, specs, whole), rule.action);
}

}  // namespace muster
