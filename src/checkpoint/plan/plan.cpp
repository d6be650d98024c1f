// SPDX-License-Identifier: Apache-2.0
// Finds plans by name (built in, for a given model, or from a file), and maps names through a plan in both directions.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <set>
#include <system_error>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/base/similar.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "src/checkpoint/plan/plan_internal.hpp"

namespace muster {
namespace {

/// A model that a built-in plan supports.
struct KnownModel {
  std::string type;          ///< "model_type"
  std::string architecture;  ///< prefix of an entry of "architectures"
  std::string plan;
  std::string condition = {};  ///< a key of config.json that must be true; empty: no condition
};

const std::vector<KnownModel>& known_models() {
  static const std::vector<KnownModel> models = [] {
    std::vector<KnownModel> all;
    const Config list = parse_json(builtin_models());
    for (const auto& [plan, of_plan] : list.as_object()) {
      if (!of_plan.is_object()) continue;  // the comment
      for (const auto& [type, model] : of_plan.as_object()) {
        if (model.is_string())
          all.push_back({type, model.as_string(), plan});
        else
          all.push_back({type, model.at("architecture").as_string(), plan, model.at("if").as_string()});
      }
    }
    std::ranges::sort(all, {}, &KnownModel::type);
    return all;
  }();
  return models;
}

bool has_type(const KnownModel& model, std::string_view type) {
  return model.type == type;
}

bool has_architecture(const KnownModel& model, std::string_view architecture) {
  if (!architecture.starts_with(model.architecture)) return false;
  const std::string_view rest = architecture.substr(model.architecture.size());
  if (rest.empty()) return true;
  if (rest == "ForConditionalGeneration") return false;  // a model with a vision tower
  return rest.starts_with("For") || rest.starts_with("Model") || rest.starts_with("LMHead");
}

bool has_stem(const KnownModel& model, std::string_view architecture) {
  return architecture.starts_with(model.architecture.substr(0, model.architecture.find("ForConditionalGeneration")) +
                                  "For");
}

bool meets(const KnownModel& model, const ConfigObject& config) {
  if (model.condition.empty()) return true;
  const Config* value = config.find(model.condition);
  if (value == nullptr) value = find_place(default_sizes(), model.type + "." + model.condition);
  return value != nullptr && value->type() == Config::Type::boolean && value->as_bool();
}

/// Returns the known model whose type resembles this one most; null if none does.
const KnownModel* nearest_model(std::string_view type) {
  std::vector<std::string_view> types;
  for (const KnownModel& model : known_models()) types.emplace_back(model.type);
  const std::vector<std::size_t> near = similar_to(type, types, 1);
  return near.empty() ? nullptr : &known_models()[near.front()];
}

/// A value of config.json that determines a plan, and its key.
struct Hint {
  std::string words;
  std::string plan;  ///< empty: unknown
};

std::vector<Hint> hints_of(const ConfigObject& config) {
  std::vector<Hint> hints;
  const KnownModel* of_type = nullptr;
  const auto add = [&](std::string_view key, const std::string& value, const auto& fits) {
    const auto model = std::ranges::find_if(
        known_models(), [&](const KnownModel& known) { return fits(known, value) && meets(known, config); });
    hints.push_back(
        {fmt::format("\"{}\" {}", key, in_quotes(value)), model == known_models().end() ? "" : model->plan});
    if (key == "model_type" && model != known_models().end()) of_type = &*model;
  };
  const Config* type = config.find("model_type");
  if (type != nullptr && type->is_string()) add("model_type", type->as_string(), has_type);
  const Config* list = config.find("architectures");
  if (list == nullptr || !list->is_array()) return hints;
  for (const Config& item : list->as_array())
    // The class of a classifier with towers begins with the name of that model, and with that of its text model.
    if (item.is_string() && hints.size() < 16 && !(of_type != nullptr && has_stem(*of_type, item.as_string())))
      add("architectures", item.as_string(), has_architecture);
  return hints;
}

/// Returns the built-in plan for a model's config.json.
std::string plan_for_model(const Config* model_config) {
  const auto refuse = [](const std::string& words) {
    throw Error(ErrorKind::invalid_argument,
                fmt::format("choosing a plan by config.json: {}. Pass --plan with a built-in plan ({}) or a file",
                            words, fmt::join(MergePlan::builtin_names(), ", ")));
  };
  if (model_config == nullptr) refuse("config.json does not exist");
  if (!model_config->is_object()) refuse(fmt::format("it is {}, not an object", to_string(model_config->type())));

  const std::vector<Hint> hints = hints_of(model_config->as_object());
  if (hints.empty()) refuse("it has neither \"model_type\" nor \"architectures\"");
  const Hint* chosen = nullptr;
  for (const Hint& hint : hints) {
    if (hint.plan.empty()) continue;
    if (chosen != nullptr && chosen->plan != hint.plan)
      refuse(fmt::format("{} requires the plan {}, and {} the plan {}", chosen->words, chosen->plan, hint.words,
                         hint.plan));
    if (chosen == nullptr) chosen = &hint;
  }
  if (chosen != nullptr) return chosen->plan;

  std::vector<std::string_view> said;
  said.reserve(hints.size());
  for (const Hint& hint : hints) said.push_back(hint.words);
  const Config* type = model_config->as_object().find("model_type");
  const KnownModel* nearest = type != nullptr && type->is_string() ? nearest_model(type->as_string()) : nullptr;
  std::string advice;
  if (nearest != nullptr)
    advice = fmt::format("; the most similar known model is {}{} (plan {})", nearest->type,
                         nearest->condition.empty() ? "" : fmt::format(" with {}", in_quotes(nearest->condition)),
                         nearest->plan);
  refuse(fmt::format("no plan supports {}{}. Run muster plan suggest MODEL_DIR for a proposal", fmt::join(said, ", "),
                     advice));
  return {};
}

std::optional<std::int64_t> size_along(const TensorSpec& spec, std::int64_t dim) {
  const auto dimensions = static_cast<std::int64_t>(spec.shape.size());
  if (dim < 0) dim += dimensions;
  if (dim < 0 || dim >= dimensions) return std::nullopt;
  return spec.shape[static_cast<std::size_t>(dim)];
}

// DeepSeek's name for scales, which are always one per block.
constexpr std::string_view block_scale = "weight_scale_inv";
constexpr std::int64_t usual_block = 128;

class Resolver {
 public:
  Resolver(const MergePlan& plan, const MergeRule& rule, std::string_view tensor, std::span<const TensorSpec> specs,
           bool whole, const MergeFacts& facts)
      : plan_(plan),
        config_(plan.model_config()),
        rule_(rule),
        tensor_(tensor),
        specs_(specs),
        whole_(whole),
        facts_(facts) {}

  ResolvedMerge operator()(const ConcatAction& action) const {
    if (action.trim && is_cut_by_columns(action.dim)) return {merge::Concat{1}};
    ResolvedMerge resolved = concat(action, action.dim, 0);
    if (action.trim) {
      resolved.true_size = number(*action.trim);
      // In reverse, the whole tensor has no padding: more rows than the true size would be lost when it is cut and
      // merged again.
      const std::optional<std::int64_t> size = whole_ ? size_along(specs_.front(), action.dim) : std::nullopt;
      if (size && *size != *resolved.true_size)
        throw Error(ErrorKind::invalid_argument,
                    fmt::format("{}: the true size of the tensor {} along dimension {} is {}, but the tensor has {}",
                                where(), in_quotes(tensor_), action.dim, *resolved.true_size, *size));
    }
    return resolved;
  }
  ResolvedMerge operator()(const ScaleAction& action) const {
    if (facts_.is_whole) return {merge::same()};
    const auto is_one = [](const TensorSpec& spec) { return element_count(spec.shape) == 1; };
    const bool all_one = std::all_of(specs_.begin(), specs_.end(), is_one);
    const std::int64_t block = action.dim ? block_along(*action.dim) : 0;
    const bool is_cut =
        action.dim &&
        (facts_.cut_along ||
         std::any_of(specs_.begin(), specs_.end(),
                     [&](const TensorSpec& spec) { return size_along(spec, *action.dim).value_or(1) > 1; }) ||
         has_own_blocks(*action.dim, block));
    if (is_cut) return concat(action, *action.dim, block);
    ResolvedMerge resolved{all_one && !whole_ ? merge::max() : merge::same()};
    resolved.block = block;
    return resolved;
  }
  ResolvedMerge operator()(const DropAction&) const { refuse_to_merge(); }
  ResolvedMerge operator()(const TieAction&) const { refuse_to_merge(); }
  template <class Plain>
  ResolvedMerge operator()(const Plain& action) const {
    return {action};
  }

 private:
  template <class Action>
  [[nodiscard]] ResolvedMerge concat(const Action& action, std::int64_t dim, std::int64_t block) const {
    ResolvedMerge resolved{merge::Concat{dim, numbers(action.blocks)}};
    resolved.block = block;
    if (action.heads.size() == 1) {
      if (const auto count = known(action.heads.front())) {
        resolved.heads = {units_of(action.heads.front(), *count)};
        resolved.head_size = head_along(action.heads.front(), dim, block) * (*count / resolved.heads.front());
      } else if (whole_ && facts_.parts > 1 && std::holds_alternative<ConcatAction>(rule_.action)) {
        throw Error(ErrorKind::invalid_argument, unknown_heads_words(plan_, action.heads.front(), facts_.parts));
      }
    } else if (!action.heads.empty()) {
      std::vector<std::int64_t> blocks = numbers(action.heads);
      for (std::size_t i = 0; i < blocks.size(); ++i) resolved.heads.push_back(units_of(action.heads[i], blocks[i]));
      resolved.head_size = action.head_sizes.empty() ? head_along(action.heads.front(), dim, block) : 1;
      for (std::size_t i = 0; i < action.head_sizes.size(); ++i)
        if (__builtin_mul_overflow(blocks[i], number(action.head_sizes[i]), &blocks[i]))
          throw Error(ErrorKind::invalid_argument, where() + ": the sum of the sizes of its heads overflows 63 bits");
      std::get<merge::Concat>(resolved.merge).blocks = std::move(blocks);
    }
    return resolved;
  }

  /// Returns the number of units of the cut. Existing ranks may have a cut that is not allowed in reverse: their
  /// tensors are joined by plain heads.
  [[nodiscard]] std::int64_t units_of(const PlanNumber& heads, std::int64_t count) const {
    const int parts = whole_ ? facts_.parts : static_cast<int>(specs_.size());
    const auto units = head_units(plan_, heads, count, parts);
    if (!units && whole_)
      throw Error(ErrorKind::invalid_argument, fmt::format("{} ranks would have parts of {} heads ({}) without the "
                                                           "keys of their group. Use at most one rank per group",
                                                           parts, count, heads.key));
    return units.value_or(count);
  }

  /// Some ranks have embeddings cut by columns where the rule expects rows (Llama 2): all rows, and their share of the
  /// model's columns.
  [[nodiscard]] bool is_cut_by_columns(std::int64_t dim) const {
    const auto hidden = model_number(config_, "hidden_size");
    const auto ranks = static_cast<std::int64_t>(specs_.size());
    return !whole_ && dim == 0 && ranks > 1 && hidden && std::ranges::all_of(specs_, [&](const TensorSpec& spec) {
      return spec.shape.size() == 2 && spec.shape[1] != *hidden && spec.shape[1] * ranks == *hidden;
    });
  }

  [[noreturn]] void refuse_to_merge() const {
    throw Error(ErrorKind::invalid_argument, where() + " leaves the tensor out, so it cannot be merged");
  }

  /// Returns a head's number of elements along the dimension; an element of a scale may cover several. 0: unknown.
  [[nodiscard]] std::int64_t head_along(const PlanNumber& heads, std::int64_t dim, std::int64_t block) const {
    const bool is_attention = heads.key.find("linear") == std::string::npos;
    const std::int64_t size = is_attention ? head_size(config_).value_or(0) : 0;
    if (!std::holds_alternative<ScaleAction>(rule_.action)) return size;
    if (block == 0) return facts_.weight.empty() && size_along(specs_.front(), dim) ? 1 : 0;
    return size % block == 0 ? size / block : 0;
  }

  /// Returns the number of the weight's elements per element of its scale. 0: unknown, or one scale element covers all
  /// of them.
  [[nodiscard]] std::int64_t block_along(std::int64_t dim) const {
    if (facts_.weight.empty()) return 0;
    const TensorSpec& scale = specs_.front();
    const TensorSpec& weight = facts_.weight.front();
    const auto of_scale = size_along(scale, dim);
    const auto of_weight = size_along(weight, dim);
    if (!of_scale || !of_weight || *of_scale < 1 || *of_weight < *of_scale) return 0;
    if (*of_scale > 1) return block_of(*of_weight, *of_scale);
    // A single element along the dimension is either for a block, or for whole rows, of which there are as many as in
    // the weight.
    if (scale.shape.size() != 2 || weight.shape.size() != 2) return 0;
    const std::size_t across = dim == 0 || dim == -2 ? 1 : 0;
    if (scale.shape[across] == weight.shape[across]) return 0;
    const std::int64_t block = said_block(scale, weight, across);
    // If the single element would cover more than a block of the whole weight, it is not for a block.
    return whole_ && *of_weight > block ? 0 : block;
  }

  /// Returns the block size along the other dimension than `across`, for a scale with a single element.
  [[nodiscard]] std::int64_t said_block(const TensorSpec& scale, const TensorSpec& weight, std::size_t across) const {
    const Config* sizes = find_in_config(config_, "quantization_config.weight_block_size");
    if (sizes != nullptr && sizes->is_array() && sizes->size() == 2)
      if (const Config& size = sizes->at(1 - across); size.type() == Config::Type::integer && size.as_int() > 0)
        return size.as_int();
    // Blocks are square unless the config specifies otherwise.
    if (scale.shape[across] > 1) return block_of(weight.shape[across], scale.shape[across]);
    return tensor_.ends_with(block_scale) ? usual_block : 0;
  }

  /// The last block may be shorter.
  [[nodiscard]] static std::int64_t block_of(std::int64_t of_weight, std::int64_t of_scale) {
    if ((of_weight + usual_block - 1) / usual_block == of_scale) return usual_block;
    if (of_weight % of_scale == 0) return of_weight / of_scale;
    return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(of_weight / of_scale)));
  }

  /// Whether ranks with one element each along the dimension have different blocks.
  [[nodiscard]] bool has_own_blocks(std::int64_t dim, std::int64_t block) const {
    if (whole_ || block == 0 || specs_.size() == 1) return false;
    std::int64_t total = 0;
    bool fits = true;
    for (std::size_t i = 0; i < facts_.weight.size(); ++i) {
      const std::int64_t size = size_along(facts_.weight[i], dim).value_or(0);
      total += size;
      fits = fits && (size == block || (i + 1 == facts_.weight.size() && size < block));
    }
    if (total <= block) return false;
    if (!fits)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("each rank has one element of the scale along dimension {} for {} elements of the "
                              "weight, and a block has {}: the shards split blocks of the weight. Shard the model "
                              "again with muster shard, which gives every rank all scales",
                              dim, size_along(facts_.weight.front(), dim).value_or(0), block));
    return true;
  }

  [[nodiscard]] std::string where() const {
    return fmt::format("plan {}: rule {}", in_quotes(plan_.name()), rule_.number);
  }

  [[nodiscard]] std::optional<std::int64_t> known(const PlanNumber& number) const {
    return number.key.empty() ? number.value : model_number(config_, number.key);
  }
  [[nodiscard]] std::int64_t number(const PlanNumber& number) const { return plan_number(plan_, number, where()); }
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
  const MergeFacts& facts_;
};

}  // namespace

std::optional<std::int64_t> head_units(const MergePlan& plan, const PlanNumber& heads, std::int64_t count,
                                       std::int64_t parts) {
  if (parts == 1 || heads.key.empty()) return count;
  const auto is = [&](std::string_view name) { return heads.key.ends_with(name); };
  const bool is_linear = is("linear_num_value_heads");
  std::int64_t groups = count;
  if (is_linear || is("num_attention_heads")) {
    const std::string path = heads.key.substr(0, heads.key.rfind('.') + 1);
    const std::string_view name = is_linear ? "linear_num_key_heads" : "num_key_value_heads";
    groups = model_number(plan.model_config(), path + std::string(name)).value_or(count);
  }
  const bool shares = parts > groups && parts % groups == 0;
  // Falcon's groups contain queries in addition to their keys, and those of linear attention contain values.
  if (shares && (is_linear || is("num_kv_heads") || is("linear_num_key_heads"))) return std::nullopt;
  if (groups >= count || count % groups != 0) return count;
  if (!shares) return groups;
  return groups == 1 || count % parts == 0 ? std::optional(count) : std::nullopt;
}

std::string unknown_heads_words(const MergePlan& plan, const PlanNumber& heads, int parts) {
  return fmt::format(
      "plan {}: {} is missing in config.json, so {} ranks could split a head. Add the number to config.json, or pass "
      "--base-model with a model that has it",
      in_quotes(plan.name()), in_quotes(heads.key), parts);
}

std::int64_t plan_number(const MergePlan& plan, const PlanNumber& number, std::string_view where) {
  if (number.key.empty()) return number.value;
  const Config& config = plan.model_config();
  const Config* found = find_in_config(config, number.key);
  if (found == nullptr || found->is_null())
    throw Error(ErrorKind::invalid_argument,
                fmt::format("{}: {} of config.json is needed, but {}", where, in_quotes(number.key),
                            config.is_null() ? "config.json does not exist" : "the key is missing"));
  if (found->type() != Config::Type::integer || found->as_int() < 1 || found->as_int() > largest_plan_number)
    throw Error(ErrorKind::invalid_argument, fmt::format("{}: {} of config.json is not an integer from 1 to {}", where,
                                                         in_quotes(number.key), largest_plan_number));
  return found->as_int();
}

bool is_left_out(const MergeRule& rule) {
  return std::holds_alternative<DropAction>(rule.action) || std::holds_alternative<TieAction>(rule.action);
}

const BuiltinPlan* find_builtin_plan(std::string_view name) {
  const auto found = std::ranges::find(builtin_plans(), name, &BuiltinPlan::name);
  return found == builtin_plans().end() ? nullptr : &*found;
}

bool is_builtin_rule(const MergeRule& rule) {
  static const std::set<std::string> patterns = [] {
    std::set<std::string> all;
    for (const BuiltinPlan& plan : builtin_plans()) {
      const Config json = parse_json(plan.json);
      const Config* rules = json.as_object().find("rules");
      if (rules == nullptr) continue;  // the plan extends another one
      for (const Config& item : rules->as_array())
        for (const Config& single : single_rules(item))
          all.insert(single.at(single.find("match") == nullptr ? "regex" : "match").as_string());
    }
    return all;
  }();
  return patterns.contains(rule.pattern.text());
}

std::span<const std::string_view> MergePlan::builtin_names() noexcept {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const BuiltinPlan& plan : builtin_plans()) all.push_back(plan.name);
    return all;
  }();
  return names;
}

MergePlan MergePlan::parse(std::string_view json, std::string name, const Config* model_config) {
  return named(json, std::move(name), model_config, {});
}

MergePlan MergePlan::named(std::string_view json, std::string name, const Config* model_config,
                           const std::string& beside) {
  MergePlan plan;
  try {
    plan = read(json, beside);
  } catch (const Error& error) {
    throw error.with_context(fmt::format("plan {}", in_quotes(name)));
  }
  plan.name_ = std::move(name);
  if (model_config != nullptr) plan.given_config_ = *model_config;
  fit_to(plan, {});
  return plan;
}

MergePlan MergePlan::load(const std::string& name_or_file, const Config* model_config) {
  const std::string name = name_or_file == "auto" ? plan_for_model(model_config) : name_or_file;
  if (const BuiltinPlan* builtin = find_builtin_plan(name)) return parse(builtin->json, name, model_config);

  std::error_code error;
  if (!std::filesystem::exists(name_or_file, error)) {
    const std::string near = did_you_mean(name_or_file, builtin_names());
    throw Error(
        ErrorKind::not_found,
        fmt::format("no plan {}: neither a file nor a built-in plan{} The built-in plans are {} and auto",
                    in_quotes(name_or_file), near.empty() ? "." : "; " + near, fmt::join(builtin_names(), ", ")),
        {.path = name_or_file});
  }
  const std::string directory = std::filesystem::path(name_or_file).parent_path().string();
  return named(read_text(name_or_file, longest_plan), name_or_file, model_config, directory.empty() ? "." : directory);
}

const MergeRule* MergePlan::find(std::string_view tensor) const {
  const auto meets = [&](const MergeRule& rule) {
    const Config* flag = rule.condition.empty() ? nullptr : find_in_config(model_config_, rule.condition);
    return rule.condition.empty() || (flag != nullptr && *flag == Config(true));
  };
  const auto rule =
      std::ranges::find_if(rules_, [&](const MergeRule& r) { return r.pattern.matches(tensor) && meets(r); });
  return rule == rules_.end() ? nullptr : &*rule;
}

Stage MergePlan::stage_of(const MergeRule& rule, std::string_view tensor) const {
  return layers_ && layers_->last && layers_->last->matches(tensor) ? Stage::last : rule.stage;
}

std::string MergePlan::renamed(const MergeRule& rule, std::string_view tensor) {
  if (!rule.rename) return std::string(tensor);
  const auto captures = rule.pattern.captures(tensor);
  if (!captures)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("rule {}: renaming: its pattern {} does not match the tensor {}", rule.number,
                            in_quotes(rule.pattern.text()), in_quotes(tensor)));
  return rule.rename->apply(*captures);
}

std::optional<MergePlan::Origin> MergePlan::origin(std::string_view result) const {
  for (const MergeRule& rule : rules_) {
    if (is_left_out(rule)) continue;
    std::string name(result);
    if (rule.rename) {
      if (!rule.rename->fits(result)) continue;
      try {
        name = rule.rename->old_name(result);
      } catch (const Error& error) {
        throw error.with_context(fmt::format("plan {}: rule {}, which names the tensor {}, is not invertible",
                                             in_quotes(name_), rule.number, in_quotes(result)));
      }
    } else if (!rule.pattern.matches(result)) {
      continue;
    }
    // The result is accepted only if it maps forward to the same name, by the same rule.
    if (find(name) == &rule && renamed(rule, name) == result) return Origin{std::move(name), &rule};
  }
  return std::nullopt;
}

// Resolves rules for tensors with known shapes: looks up numbers of config.json, and determines the kind of a scale by
// its shape.

ResolvedMerge MergePlan::resolve(const MergeRule& rule, std::string_view tensor, std::span<const TensorSpec> specs,
                                 bool whole, const MergeFacts& facts) const {
  if (specs.empty())
    throw Error(ErrorKind::invalid_argument, fmt::format("plan {}: rule {}: no rank has the tensor {}",
                                                         in_quotes(name_), rule.number, in_quotes(tensor)));
  if (rule.across == Axis::expert && experts_ && experts_->find(tensor))
    throw Error(ErrorKind::invalid_argument,
                fmt::format("plan {}: rule {} joins the tensor {} across expert ranks, but \"experts\" ({}) assigns it "
                            "to one expert rank. Remove one of the two",
                            in_quotes(name_), rule.number, in_quotes(tensor), in_quotes(experts_->pattern.text())));
  return std::visit(Resolver(*this, rule, tensor, specs, whole, facts), rule.action);
}

}  // namespace muster
