// SPDX-License-Identifier: Apache-2.0
// Plans as JSON text. Unknown keys, and keys that do not belong to their action, are errors: a misspelt key would
// otherwise silently change the output.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/plan/plan_internal.hpp"
#include "src/formats/json_text.hpp"

namespace muster {
namespace {

constexpr std::size_t most_rules = 10'000;
constexpr int most_extended = 4;  // number of files
constexpr std::size_t most_blocks = 64;
constexpr std::size_t most_expanded = 16 << 20;  // total characters of all patterns with braces expanded
constexpr std::int64_t most_dimensions = 64;
// Comparing all pairs of patterns takes quadratic time, which a hostile plan could extend to minutes. Beyond this sum
// of products of lengths, only equal patterns are found.
constexpr std::size_t most_work = std::size_t{1} << 29;

[[noreturn]] void refuse_plan(const std::string& words) {
  throw Error(ErrorKind::corrupt, words);
}

using Keys = std::vector<std::string_view>;

void check_keys(const ConfigObject& object, const Keys& known, std::string_view of) {
  for (const auto& [key, value] : object) {
    if (std::find(known.begin(), known.end(), key) == known.end())
      refuse_plan(fmt::format("unknown key {}{} (known: {})", in_quotes(key), of, fmt::join(known, ", ")));
  }
}

const std::string& string_of(const Config& value, std::string_view key) {
  if (!value.is_string()) refuse_plan(fmt::format("{} is {}, not a string", in_quotes(key), to_string(value.type())));
  return value.as_string();
}

std::int64_t dimension(const Config& value) {
  if (value.type() != Config::Type::integer || value.as_int() < -most_dimensions || value.as_int() >= most_dimensions)
    refuse_plan(fmt::format("\"dim\" is not an integer from {} to {}", -most_dimensions, most_dimensions - 1));
  return value.as_int();
}

PlanNumber number(const Config& value, std::string_view key) {
  if (value.is_string() && !value.as_string().empty()) return {0, value.as_string()};
  if (value.type() != Config::Type::integer || value.as_int() < 1 || value.as_int() > largest_plan_number)
    refuse_plan(fmt::format("{} has a value that is neither an integer from 1 to {} nor the name of one in config.json",
                            in_quotes(key), largest_plan_number));
  return {value.as_int(), {}};
}

std::vector<PlanNumber> numbers(const ConfigObject& rule, std::string_view key) {
  const Config* list = rule.find(key);
  if (list == nullptr) return {};
  if (!list->is_array() || list->size() < 2 || list->size() > most_blocks)
    refuse_plan(fmt::format("{} is not a list of 2 to {} numbers", in_quotes(key), most_blocks));
  std::vector<PlanNumber> numbers;
  for (const Config& item : list->as_array()) numbers.push_back(number(item, key));
  return numbers;
}

// A single number, or one per fused tensor.
std::vector<PlanNumber> heads(const ConfigObject& rule) {
  const Config* value = rule.find("heads");
  if (value == nullptr) return {};
  for (const std::string_view other : {"blocks", "trim"})
    if (rule.find(other) != nullptr)
      refuse_plan(fmt::format("\"heads\" and {} contradict each other", in_quotes(other)));
  return value->is_array() ? numbers(rule, "heads") : std::vector{number(*value, "heads")};
}

std::vector<PlanNumber> head_sizes(const ConfigObject& rule) {
  std::vector<PlanNumber> sizes = numbers(rule, "head_sizes");
  if (!sizes.empty() && sizes.size() != heads(rule).size())
    refuse_plan("\"head_sizes\" needs \"heads\", a list of as many numbers");
  return sizes;
}

MergeAction read_concat(const ConfigObject& rule) {
  const Config* dim = rule.find("dim");
  if (dim == nullptr) refuse_plan("\"concat\" needs \"dim\", the dimension along which the parts of ranks are joined");
  ConcatAction action{dimension(*dim), numbers(rule, "blocks"), {}, heads(rule), head_sizes(rule)};
  if (const Config* trim = rule.find("trim")) {
    if (!action.blocks.empty())
      refuse_plan("\"trim\" and \"blocks\" contradict each other: the block with the padding is unknown");
    action.trim = number(*trim, "trim");
  }
  return action;
}

MergeAction read_scale(const ConfigObject& rule) {
  ScaleAction action;
  if (const Config* dim = rule.find("dim")) action.dim = dimension(*dim);
  action.blocks = numbers(rule, "blocks");
  action.heads = heads(rule);
  action.head_sizes = head_sizes(rule);
  if (!action.dim && !(action.blocks.empty() && action.heads.empty()))
    refuse_plan(fmt::format("{} needs \"dim\", their dimension", in_quotes(action.heads.empty() ? "blocks" : "heads")));
  return action;
}

MergeAction read_drop(const ConfigObject& rule) {
  const Config* reason = rule.find("reason");
  return DropAction{reason == nullptr ? std::string() : string_of(*reason, "reason")};
}

template <class Action>
MergeAction read_plain(const ConfigObject&) {
  return Action{};
}

// In the order of MergeAction's alternatives.
struct ActionReader {
  std::string_view name;
  MergeAction (*read)(const ConfigObject&);
  std::array<std::string_view, 5> keys;  // in addition to those of every rule
};
constexpr std::array<ActionReader, std::variant_size_v<MergeAction>> action_readers = {{
    {"concat", read_concat, {"dim", "blocks", "trim", "heads", "head_sizes"}},
    {"same", read_plain<merge::Same>, {}},
    {"first", read_plain<merge::First>, {}},
    {"max", read_plain<merge::Max>, {}},
    {"sum", read_plain<merge::Sum>, {}},
    {"stack", read_plain<merge::Stack>, {}},
    {"scale", read_scale, {"dim", "blocks", "heads", "head_sizes"}},
    {"drop", read_drop, {"reason"}},
    {"tie", read_plain<TieAction>, {"with"}},
}};

const ActionReader& reader_of(const ConfigObject& rule) {
  const Config* action = rule.find("action");
  if (action == nullptr) refuse_plan("\"action\" is missing");
  const std::string& name = string_of(*action, "action");
  const auto* reader =
      std::find_if(action_readers.begin(), action_readers.end(), [&](const ActionReader& r) { return r.name == name; });
  if (reader != action_readers.end()) return *reader;
  Keys names;
  for (const ActionReader& known : action_readers) names.push_back(known.name);
  names.insert(names.end(), {"column", "row"});
  refuse_plan(fmt::format("unknown action {} (known: {})", in_quotes(name), fmt::join(names, ", ")));
}

TensorPattern read_pattern(const ConfigObject& rule) {
  const Config* glob = rule.find("match");
  const Config* regex = rule.find("regex");
  if ((glob == nullptr) == (regex == nullptr)) refuse_plan("exactly one of \"match\" (a glob) and \"regex\" is needed");
  return glob != nullptr ? TensorPattern::glob(string_of(*glob, "match"))
                         : TensorPattern::regex(string_of(*regex, "regex"));
}

template <class Value, std::size_t count>
Value one_of(const ConfigObject& rule, std::string_view key, Value otherwise,
             const std::array<std::pair<std::string_view, Value>, count>& words) {
  const Config* value = rule.find(key);
  if (value == nullptr) return otherwise;
  const std::string& text = string_of(*value, key);
  Keys known;
  for (const auto& [word, meaning] : words) {
    if (word == text) return meaning;
    known.push_back(word);
  }
  refuse_plan(fmt::format("{} is {}, not one of {}", in_quotes(key), in_quotes(text), fmt::join(known, ", ")));
}

constexpr std::array<std::pair<std::string_view, Stage>, 4> stages = {
    {{"first", Stage::first}, {"last", Stage::last}, {"ends", Stage::ends}, {"all", Stage::all}}};
constexpr std::array<std::pair<std::string_view, Axis>, 2> axes = {
    {{"tensor", Axis::tensor}, {"expert", Axis::expert}}};

std::shared_ptr<const NewName> read_rename(const ConfigObject& rule, const TensorPattern& pattern,
                                           std::string_view key) {
  const Config* rename = rule.find(key);
  if (rename == nullptr) return nullptr;
  const std::string& text = string_of(*rename, key);
  if (text.empty()) refuse_plan(fmt::format("{} is an empty name", in_quotes(key)));
  return std::make_shared<const NewName>(text, pattern);
}

/// One of the rules that the actions "column" and "row" represent: how some tensors of a linear layer are joined.
struct LinearPart {
  std::string_view names;  // suffixes after the layer's name
  std::string_view action;
  std::optional<std::int64_t> dim = {};
  bool has_units = true;  // "blocks" and "heads" also apply to it if it has a dimension
};
// Rows of the weight are its outputs, columns its inputs. Files of GPTQ and AWQ have transposed weights.
constexpr std::array<LinearPart, 7> column_parts = {
    {{".{weight,bias}", "concat", 0},
     {".{weight_scale*,weight_quantizer.*,output_scale,output_quantizer.*}", "scale", 0},
     {".{pre_quant_scale,input_quantizer._pre_quant_scale}", "same"},
     {".{input_scale*,input_quantizer.*}", "scale"},
     {".{qweight,scales,qzeros}", "concat", 1},
     {".weight_packed", "concat", 0},
     {".{g_idx,weight_shape}", "same"}}};
constexpr std::array<LinearPart, 9> row_parts = {{{".weight", "concat", 1},
                                                  {".{bias,weight_shape}", "same"},
                                                  {".{weight_scale*,weight_quantizer.*}", "scale", 1},
                                                  {".{pre_quant_scale,input_quantizer._pre_quant_scale}", "concat", -1},
                                                  {".{input_scale*,input_quantizer.*}", "scale", -1, false},
                                                  {".{output_scale,output_quantizer.*}", "scale"},
                                                  {".{qweight,g_idx}", "concat", 0},
                                                  {".{scales,qzeros}", "scale", 0},
                                                  {".weight_packed", "concat", 1}}};

}  // namespace

std::vector<Config> single_rules(const Config& rule) {
  const Config* action = rule.is_object() ? rule.as_object().find("action") : nullptr;
  const bool is_column = action != nullptr && *action == Config("column");
  if (!is_column && (action == nullptr || *action != Config("row"))) return {rule};
  const ConfigObject& object = rule.as_object();
  constexpr std::array<std::string_view, 3> units = {"blocks", "heads", "head_sizes"};
  Keys keys = {"match", "if", "action", "comment", "stage", "across"};
  keys.insert(keys.end(), units.begin(), units.end());
  check_keys(object, keys, fmt::format(" of the action {}", in_quotes(action->as_string())));
  const Config* match = object.find("match");
  if (match == nullptr)
    refuse_plan(fmt::format("{} needs \"match\", a glob of layers", in_quotes(action->as_string())));
  std::vector<Config> rules;
  for (const LinearPart& part : is_column ? std::span<const LinearPart>(column_parts) : row_parts) {
    Config& made = rules.emplace_back(ConfigObject());
    for (const auto& [key, value] : object)
      if ((part.dim && part.has_units) || std::ranges::find(units, key) == units.end()) made[key] = value;
    made["match"] = string_of(*match, "match") + std::string(part.names);
    made["action"] = part.action;
    if (part.dim) made["dim"] = *part.dim;
  }
  return rules;
}

namespace {

MergeRule read_rule(const Config& value, std::size_t number) {
  if (!value.is_object()) refuse_plan(fmt::format("it is {}, not an object", to_string(value.type())));
  const ConfigObject& rule = value.as_object();
  const ActionReader& reader = reader_of(rule);
  Keys keys = {"match", "regex", "if", "action", "comment"};
  // A tensor that is left out needs no new name, stage or joined ranks.
  const bool is_left_out = reader.name == "drop" || reader.name == "tie";
  if (!is_left_out) keys.insert(keys.end(), {"rename", "stage", "across"});
  for (const std::string_view key : reader.keys)
    if (!key.empty()) keys.push_back(key);
  check_keys(rule, keys, fmt::format(" of the action {}", in_quotes(reader.name)));

  MergeRule read{read_pattern(rule), reader.read(rule)};
  read.rename = read_rename(rule, read.pattern, reader.name == "tie" ? "with" : "rename");
  if (reader.name == "tie" && !read.rename)
    refuse_plan("\"tie\" needs \"with\", the name of the tensor that it must equal");
  read.stage = one_of(rule, "stage", Stage::first, stages);
  read.across = one_of(rule, "across", Axis::tensor, axes);
  read.number = number;
  if (const Config* condition = rule.find("if")) read.condition = string_of(*condition, "if");
  return read;
}

bool flag(const ConfigObject& rule, std::string_view key) {
  const Config* value = rule.find(key);
  if (value == nullptr) return false;
  if (value->type() != Config::Type::boolean) refuse_plan(fmt::format("{} is neither true nor false", in_quotes(key)));
  return value->as_bool();
}

constexpr std::array<std::pair<std::string_view, ViewRule::Split::By>, 4> split_kinds = {
    {{"blocks", ViewRule::Split::By::blocks},
     {"heads", ViewRule::Split::By::heads},
     {"groups", ViewRule::Split::By::groups},
     {"gated_groups", ViewRule::Split::By::gated_groups}}};

ViewRule::Split read_split(const Config& value) {
  if (!value.is_object())
    refuse_plan("\"split\" is not an object with \"blocks\", \"heads\", \"groups\" or \"gated_groups\"");
  const ConfigObject& object = value.as_object();
  check_keys(object, {"dim", "blocks", "heads", "groups", "gated_groups"}, " of \"split\"");
  ViewRule::Split split;
  if (const Config* dim = object.find("dim")) split.dim = dimension(*dim);
  for (const auto& [key, by] : split_kinds) {
    if (object.find(key) == nullptr) continue;
    if (!split.counts.empty())
      refuse_plan("\"split\" has more than one of \"blocks\", \"heads\", \"groups\" and \"gated_groups\"");
    split.by = by;
    split.counts = numbers(object, key);
  }
  if (split.counts.empty())
    refuse_plan("\"split\" has neither \"blocks\" nor \"heads\", \"groups\" or \"gated_groups\"");
  return split;
}

constexpr std::array<std::pair<std::string_view, DType>, 3> cast_dtypes = {
    {{"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16}}};

/// `true` is 1.
int read_unstack(const ConfigObject& object) {
  const Config* value = object.find("unstack");
  if (value == nullptr || value->type() != Config::Type::integer) return flag(object, "unstack") ? 1 : 0;
  constexpr std::int64_t most = 2;
  if (value->as_int() < 1 || value->as_int() > most) refuse_plan("\"unstack\" is neither true nor 1 nor 2");
  return static_cast<int>(value->as_int());
}

ViewRule read_view(const Config& value, std::size_t number_of_it) {
  if (!value.is_object()) refuse_plan(fmt::format("it is {}, not an object", to_string(value.type())));
  const ConfigObject& object = value.as_object();
  check_keys(
      object,
      {"match", "regex", "to", "unstack", "transpose", "split", "permute_rope", "cast", "overflow", "drop", "comment"},
      "");
  ViewRule view{read_pattern(object)};
  view.number = number_of_it;
  if (const Config* drop = object.find("drop")) {
    view.drop = string_of(*drop, "drop");
    for (const std::string_view key : {"to", "unstack", "transpose", "split", "permute_rope", "cast", "overflow"})
      if (object.find(key) != nullptr)
        refuse_plan(fmt::format("\"drop\" and {} contradict each other", in_quotes(key)));
    return view;
  }
  view.unstack = read_unstack(object);
  view.transpose = flag(object, "transpose");
  view.may_overflow = flag(object, "overflow");
  if (const Config* split = object.find("split")) view.split = read_split(*split);
  if (const Config* heads_of = object.find("permute_rope")) view.permute_rope = number(*heads_of, "permute_rope");
  if (object.find("cast") != nullptr) view.cast = one_of(object, "cast", DType::f32, cast_dtypes);
  if (view.may_overflow && !view.cast) refuse_plan("\"overflow\" needs \"cast\"");
  const Config* to = object.find("to");
  const std::size_t parts = view.split ? view.split->counts.size() : 1;
  std::vector<std::string> names;
  if (to != nullptr && to->is_string()) {
    names.push_back(to->as_string());
  } else if (to != nullptr) {
    if (!to->is_array()) refuse_plan("\"to\" is neither a name nor a list of names");
    for (const Config& item : to->as_array()) names.push_back(string_of(item, "to"));
  }
  if ((to != nullptr || view.split || view.unstack != 0) && names.size() != parts)
    refuse_plan(fmt::format("\"to\" has {} names for {} part{}", names.size(), parts, parts == 1 ? "" : "s"));
  for (const std::string& name : names) {
    if (name.empty()) refuse_plan("\"to\" has an empty name");
    const auto places = std::count(name.begin(), name.end(), '#');
    if (view.unstack != 0 && places != view.unstack)
      refuse_plan("\"unstack\" needs one \"#\", the number of the item, in \"to\" for each dimension");
    view.to.push_back(std::make_shared<const NewName>(name, view.pattern));
  }
  return view;
}

std::vector<ViewRule> read_views(const ConfigObject& plan, const std::vector<std::size_t>& lines) {
  std::vector<ViewRule> views;
  const Config* list = plan.find("views");
  if (list == nullptr) return views;
  if (!list->is_array()) refuse_plan("\"views\" is not a list");
  if (list->size() > most_rules) refuse_plan(fmt::format("{} views: the limit is {}", list->size(), most_rules));
  for (const Config& item : list->as_array()) {
    try {
      views.push_back(read_view(item, views.size() + 1));
    } catch (const Error& error) {
      throw Error(ErrorKind::corrupt,
                  fmt::format("view {} (line {}): {}", views.size() + 1, lines.at(views.size()), error.what()));
    }
  }
  return views;
}

std::optional<Numbering> read_numbering(const ConfigObject& plan, std::string_view key) {
  const Config* value = plan.find(key);
  if (value == nullptr) return std::nullopt;
  try {
    if (value->is_string()) return Numbering{NumberPattern::parse(value->as_string()), false};
    if (!value->is_object())
      refuse_plan(fmt::format("it is {}, neither a pattern nor an object", to_string(value->type())));
    const ConfigObject& object = value->as_object();
    const bool is_layers = key == "layers";
    check_keys(object, is_layers ? Keys{"match", "renumber", "last", "comment"} : Keys{"match", "renumber", "comment"},
               "");
    const Config* match = object.find("match");
    if (match == nullptr) refuse_plan("\"match\" is missing");
    Numbering numbering{NumberPattern::parse(string_of(*match, "match")), flag(object, "renumber")};
    if (const Config* last = object.find("last")) numbering.last = TensorPattern::glob(string_of(*last, "last"));
    return numbering;
  } catch (const Error& error) {
    throw Error(ErrorKind::corrupt, fmt::format("{}: {}", in_quotes(key), error.what()));
  }
}

/// Finds rules that match no tensor because of earlier rules, which is a mistake in the plan.
class Reach {
 public:
  /// Returns why the rule is never reached after those that were added; empty if it is reached.
  std::string add(const MergeRule& rule) {
    const TensorPattern& pattern = rule.pattern;
    if (!rule.condition.empty()) return {};  // later rules may be reached, too
    const auto [same, is_new] = texts_.try_emplace({pattern.is_regex(), pattern.text()}, rule.number);
    if (!is_new) return fmt::format("the rule is never reached, because rule {} has the same pattern", same->second);
    if (all_ != 0) return fmt::format("the rule is never reached, because rule {} matches all tensors", all_);
    if (pattern.is_regex()) {
      if (pattern.text() == ".*" || pattern.text() == "(.*)") all_ = rule.number;
      return {};
    }
    const std::vector<std::string> globs = expand_braces(pattern.text());
    for (const std::string& glob : globs) {
      expanded_ += glob.size();
      if (!glob.empty() && glob.find_first_not_of('*') == std::string::npos) all_ = rule.number;
    }
    if (expanded_ > most_expanded)
      refuse_plan(fmt::format("the expanded braces of all patterns up to this one have more than {} characters",
                              most_expanded));
    std::string words = covered(pattern, globs);
    globs_.emplace_back(pattern, rule.number);
    return words;
  }

 private:
  std::string covered(const TensorPattern& pattern, const std::vector<std::string>& globs) {
    std::set<std::size_t> by;
    for (const std::string& glob : globs) {
      const std::size_t earlier = covering(glob);
      if (earlier == 0) return {};
      by.insert(earlier);
    }
    std::vector<std::size_t> some(by.begin(), by.end());
    some.resize(std::min<std::size_t>(some.size(), 5));
    return fmt::format("pattern {} is never reached: rule{} {} match{} all its names", in_quotes(pattern.text()),
                       by.size() == 1 ? "" : "s", fmt::join(some, ", "), by.size() == 1 ? "s" : "");
  }

  // One glob covers another if it matches the other's text, because only its own stars can match the other's stars as
  // characters. Returns the number of the covering rule; 0 if there is none.
  std::size_t covering(const std::string& glob) {
    for (const auto& [pattern, number] : globs_) {
      work_ += pattern.text().size() * glob.size();
      if (work_ > most_work) return 0;
      if (pattern.matches(glob)) return number;
    }
    return 0;
  }

  std::map<std::pair<bool, std::string>, std::size_t> texts_;
  std::vector<std::pair<TensorPattern, std::size_t>> globs_;  // with the numbers of their rules
  std::size_t all_ = 0;                                       // the number of a rule that matches everything
  std::size_t expanded_ = 0;
  std::size_t work_ = 0;
};

std::vector<MergeRule> read_rules(const Config& list, const std::vector<std::size_t>& lines, Reach& reach) {
  std::vector<MergeRule> rules;
  std::size_t number = 0;
  for (const Config& item : list.as_array()) {
    ++number;
    try {
      std::string unreached;
      const std::size_t before = rules.size();
      for (const Config& part : single_rules(item)) {
        MergeRule rule = read_rule(part, number);
        unreached = reach.add(rule);
        if (unreached.empty()) rules.push_back(std::move(rule));
      }
      if (rules.size() == before) refuse_plan(unreached);
    } catch (const Error& error) {
      throw Error(ErrorKind::corrupt, fmt::format("rule {} (line {}): {}", number, lines.at(number - 1), error.what()));
    }
  }
  return rules;
}

/// Returns a plan without "extends": its own members, and the members of `content`. `reach` has its rules.
Config extended(const ConfigObject& plan, const MergePlan& content, Reach& reach) {
  Config whole = ConfigObject();
  for (const auto& [key, value] : plan)
    if (key != "extends") whole[key] = value;
  // The base may extend another plan itself.
  const Config whole_base = parse_json(content.text());
  for (const std::string_view key : {"layers", "experts", "at"})
    if (const Config* value = whole_base.as_object().find(key); value != nullptr && plan.find(key) == nullptr)
      whole[key] = *value;
  if (const Config* views = whole_base.as_object().find("views"); views != nullptr)
    for (const Config& view : views->as_array()) whole["views"].push_back(view);
  if (plan.find("rules") == nullptr) whole["rules"] = ConfigArray();
  for (const MergeRule& rule : content.rules()) {
    if (!reach.add(rule).empty()) continue;
    const std::vector<Config> parts = single_rules(whole_base.at("rules").at(rule.number - 1));
    for (const Config& part : parts)
      if (parts.size() == 1 || part.at("match").as_string() == rule.pattern.text()) whole["rules"].push_back(part);
  }
  return whole;
}

}  // namespace

std::string_view action_name(const MergeAction& action) noexcept {
  return action_readers[action.index()].name;
}

MergePlan MergePlan::read(std::string_view json, const std::string& beside, int depth) {
  std::vector<std::size_t> lines;
  const Config plan = core::parse_json_lines(json, "rules", lines);
  std::vector<std::size_t> view_lines;
  core::parse_json_lines(json, "views", view_lines);
  if (!plan.is_object()) refuse_plan(fmt::format("not a plan: it is {}, not an object", to_string(plan.type())));
  const ConfigObject& members = plan.as_object();
  check_keys(members, {"muster_plan", "comment", "extends", "layers", "experts", "at", "views", "rules"}, "");
  const Config* version = members.find("muster_plan");
  if (version == nullptr) refuse_plan("not a plan: \"muster_plan\": 1 is missing");
  if (version->type() != Config::Type::integer || version->as_int() != 1)
    throw Error(ErrorKind::version, "unknown version: \"muster_plan\" is not 1. Use a newer Muster");
  const Config* list = members.find("rules");
  const Config* base = members.find("extends");
  const Config none = ConfigArray();
  if (list == nullptr && base != nullptr) list = &none;
  if (list == nullptr || !list->is_array() || (list->size() == 0 && base == nullptr))
    refuse_plan("\"rules\" is not a list with at least one rule");
  if (list->size() > most_rules) refuse_plan(fmt::format("{} rules: the limit is {}", list->size(), most_rules));

  Reach reach;
  MergePlan result;
  result.text_ = json;
  result.rules_ = read_rules(*list, lines, reach);
  result.layers_ = read_numbering(members, "layers");
  result.experts_ = read_numbering(members, "experts");
  if (const Config* at = members.find("at")) result.at_ = string_of(*at, "at");
  result.views_ = read_views(members, view_lines);
  if (base == nullptr) return result;
  const std::string& name = string_of(*base, "extends");
  MergePlan content;
  if (const BuiltinPlan* builtin = find_builtin_plan(name)) {
    content = read(builtin->json);
  } else {
    std::error_code error;
    const std::string path = beside.empty() || !is_name_beside(name) ? std::string() : join_path(beside, name);
    if (path.empty() || !std::filesystem::is_regular_file(path, error))
      refuse_plan(fmt::format("\"extends\" is {}, which is neither a built-in plan ({}) nor a file next to the plan",
                              in_quotes(name), fmt::join(builtin_names(), ", ")));
    if (depth == most_extended)
      refuse_plan(
          fmt::format("\"extends\" is {}: plans extend each other in a circle, or more than {} plans form a chain",
                      in_quotes(name), most_extended));
    try {
      content = read(read_text(path, longest_plan), beside, depth + 1);
    } catch (const Error& failure) {
      throw failure.with_context(fmt::format("plan {}", in_quotes(path)));
    }
  }
  return read(to_json(extended(members, content, reach), 2) + "\n");
}

}  // namespace muster
