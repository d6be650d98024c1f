// SPDX-License-Identifier: Apache-2.0
// Names of tensors: patterns, numbers in names, new names, their order, which names belong together, and lists of names
// in messages. Patterns are regular expressions of RE2, which run in linear time. A glob is converted to one with lazy
// stars: from the left on, each matches as little as possible.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <re2/re2.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/plan/arrangement.hpp"
#include "src/checkpoint/plan/plan_internal.hpp"

namespace muster {
namespace {

constexpr std::size_t longest_pattern = 1024;
constexpr std::size_t most_globs = 256;
constexpr std::string_view any = "(.*?)";
// At most 18 digits, which fit 63 bits. A number with a leading zero is not accepted, because writing it again would
// change it.
constexpr std::string_view digits = "(0|[1-9][0-9]{0,17})";

re2::StringPiece piece(std::string_view text) {
  return {text.data(), text.size()};
}

void check_length(std::string_view what, std::string_view text) {
  if (text.size() > longest_pattern)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("a {} has {} characters, and the limit is {}", what, text.size(), longest_pattern));
}

/// `bytes`: text and names are bytes, and a dot matches any byte; otherwise they are UTF-8.
std::shared_ptr<const re2::RE2> compile(const std::string& text, bool bytes) {
  re2::RE2::Options options;
  options.set_log_errors(false);
  options.set_max_mem(1 << 20);
  if (bytes) {
    options.set_encoding(re2::RE2::Options::EncodingLatin1);
    options.set_dot_nl(true);
  }
  auto regex = std::make_shared<re2::RE2>(text, options);
  if (!regex->ok())
    throw Error(ErrorKind::invalid_argument,
                fmt::format("malformed regular expression {}: {}", in_quotes(text), regex->error()));
  return regex;
}

/// Converts a glob with valid braces to a regular expression.
std::string regex_of(std::string_view glob, std::string_view star, std::string_view number) {
  std::string regex;
  bool in_braces = false;
  for (const char c : glob) {
    if (c == '*') {
      regex += star;
    } else if (c == '#' && !number.empty()) {
      regex += number;
    } else if (c == '{' || c == '}') {
      in_braces = c == '{';
      regex += in_braces ? "(?:" : ")";
    } else if (c == ',' && in_braces) {
      regex += '|';
    } else {
      regex += re2::RE2::QuoteMeta(re2::StringPiece(&c, 1));
    }
  }
  return regex;
}

/// Returns the matches of the expression's groups in a name, for those that take part; nullopt if it does not match the
/// whole name.
std::optional<std::vector<std::string_view>> groups_in(const re2::RE2& regex, std::string_view name) {
  if (name.data() == nullptr) name = "";
  const int count = regex.NumberOfCapturingGroups() + 1;  // the first one is the whole name
  std::vector<re2::StringPiece> found(static_cast<std::size_t>(count));
  if (!regex.Match(piece(name), 0, name.size(), re2::RE2::ANCHOR_BOTH, found.data(), count)) return std::nullopt;
  std::vector<std::string_view> groups;
  for (std::size_t i = 1; i < found.size(); ++i) groups.emplace_back(found[i].data(), found[i].size());
  return groups;
}

constexpr std::size_t most_names = 10;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Removes the digits at the front of `text`, without leading zeros, and returns them.
std::string_view take_number(std::string_view& text) {
  std::size_t end = 0;
  while (end < text.size() && is_digit(text[end])) ++end;
  std::string_view number = text.substr(0, end);
  text.remove_prefix(end);
  number.remove_prefix(std::min(number.find_first_not_of('0'), number.size()));
  return number;
}

}  // namespace

std::vector<std::string> expand_braces(const std::string& text) {
  std::vector<std::string> globs(1);
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == '}')
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("malformed pattern {}: a brace is closed that was not opened", in_quotes(text)));
    if (text[at] != '{') {
      const std::size_t end = std::min(text.find_first_of("{}", at), text.size());
      for (std::string& glob : globs) glob.append(text, at, end - at);
      at = end;
      continue;
    }
    const std::size_t close = text.find_first_of("{}", at + 1);
    if (close == std::string::npos || text[close] == '{')
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("malformed pattern {}: {}", in_quotes(text),
                              close == std::string::npos ? "a brace is not closed" : "nested braces"));
    std::vector<std::string> longer;
    for (std::size_t begin = at + 1; begin <= close;) {
      const std::size_t end = std::min(text.find(',', begin), close);
      if (longer.size() + globs.size() > most_globs)
        throw Error(ErrorKind::invalid_argument,
                    fmt::format("pattern {}: the braces expand to more than {} patterns", in_quotes(text), most_globs));
      for (const std::string& glob : globs) longer.push_back(glob + text.substr(begin, end - begin));
      begin = end + 1;
    }
    globs = std::move(longer);
    at = close + 1;
  }
  return globs;
}

std::string any_of_globs(std::span<const std::string> globs) {
  if (globs.empty()) return {};
  if (globs.size() == 1) return globs.front();
  std::string list;
  for (const std::string& glob : globs)
    for (const std::string& one : expand_braces(glob)) {
      if (one.find(',') != std::string::npos)
        throw Error(ErrorKind::invalid_argument,
                    fmt::format("the pattern {} has a comma outside braces. Use * instead", in_quotes(glob)));
      list += (list.empty() ? "" : ",") + one;
    }
  return "{" + list + "}";
}

TensorPattern TensorPattern::glob(std::string text) {
  check_length("pattern", text);
  expand_braces(text);  // only to throw on an error
  TensorPattern pattern;
  pattern.regex_ = compile(regex_of(text, any, {}), true);
  pattern.text_ = std::move(text);
  return pattern;
}

TensorPattern TensorPattern::regex(std::string text) {
  check_length("regular expression", text);
  TensorPattern pattern;
  pattern.regex_ = compile(text, false);
  pattern.text_ = std::move(text);
  pattern.is_regex_ = true;
  return pattern;
}

bool TensorPattern::matches(std::string_view name) const {
  return re2::RE2::FullMatch(piece(name), *regex_);
}

std::optional<std::size_t> TensorPattern::groups() const {
  if (is_regex_) return static_cast<std::size_t>(regex_->NumberOfCapturingGroups());
  const std::vector<std::string> globs = expand_braces(text_);
  const auto stars = [](const std::string& glob) { return std::count(glob.begin(), glob.end(), '*'); };
  const auto count = stars(globs.front());
  const bool agree = std::ranges::all_of(globs, [&](const std::string& glob) { return stars(glob) == count; });
  return agree ? std::optional(static_cast<std::size_t>(count)) : std::nullopt;
}

std::optional<std::vector<std::string_view>> TensorPattern::captures(std::string_view name) const {
  auto found = groups_in(*regex_, name);
  // Stars of brace alternatives that were not chosen take no part in the match.
  if (found && !is_regex_) std::erase_if(*found, [](std::string_view part) { return part.data() == nullptr; });
  return found;
}

NumberPattern NumberPattern::parse(std::string text) {
  check_length("pattern", text);
  const auto count = std::count(text.begin(), text.end(), '#');
  if (count != 1)
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format("malformed pattern {}: it has {} \"#\", not exactly one for the number", in_quotes(text), count));
  expand_braces(text);  // only to throw on an error
  const std::string before = text.substr(0, text.find('#'));
  // Inside braces, some of the alternatives would lack it.
  if (std::count(before.begin(), before.end(), '{') != std::count(before.begin(), before.end(), '}'))
    throw Error(ErrorKind::invalid_argument,
                fmt::format("malformed pattern {}: \"#\" is inside braces", in_quotes(text)));
  NumberPattern pattern;
  pattern.regex_ = compile(regex_of(text, ".*?", digits), true);
  pattern.text_ = std::move(text);
  return pattern;
}

std::optional<std::int64_t> NumberPattern::find(std::string_view name) const {
  const auto found = groups_in(*regex_, name);
  if (!found) return std::nullopt;
  const std::string_view digits = found->front();
  std::int64_t number = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return number;
}

std::optional<std::int64_t> Numbering::find(std::string_view name) const {
  if (last && last->matches(name)) return std::nullopt;
  return pattern.find(name);
}

std::string NumberPattern::replace(std::string_view name, std::int64_t number) const {
  const auto found = groups_in(*regex_, name);
  if (!found)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("tensor {}: the name has no number where the pattern {} expects one", in_quotes(name),
                            in_quotes(text_)));
  const auto at = static_cast<std::size_t>(found->front().data() - name.data());
  return fmt::format("{}{}{}", name.substr(0, at), number, name.substr(at + found->front().size()));
}

NewName::NewName(std::string_view text, const TensorPattern& pattern) : text_(text) {
  const std::optional<std::size_t> groups = pattern.groups();
  if (!groups)
    throw Error(ErrorKind::invalid_argument,
                "\"rename\" counts the stars of the pattern, but the alternatives in its braces have different numbers "
                "of stars");
  const auto literal = [&]() -> std::string& {
    if (parts_.empty() || parts_.back().is_group) parts_.push_back({});
    return parts_.back().text;
  };
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] != '$') {
      literal() += text[at++];
      continue;
    }
    if (text.substr(at, 2) == "$$") {
      literal() += '$';
      at += 2;
      continue;
    }
    std::size_t number = 0;
    const char* begin = text.data() + at + 1;
    const auto [end, status] = std::from_chars(begin, text.data() + text.size(), number);
    if (end == begin)
      throw Error(
          ErrorKind::invalid_argument,
          fmt::format("the new name {} has a \"$\" without a number. Write \"$$\" for a dollar", in_quotes(text)));
    if (status != std::errc() || number < 1 || number > *groups)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("the new name {} has \"${}\", but its pattern has {} star{} or group{}", in_quotes(text),
                              std::string_view(begin, static_cast<std::size_t>(end - begin)), *groups,
                              *groups == 1 ? "" : "s", *groups == 1 ? "" : "s"));
    parts_.push_back({{}, number - 1, true});
    at = static_cast<std::size_t>(end - text.data());
  }

  std::vector<std::size_t> uses(*groups);
  std::string regex;
  for (const TemplatePart& part : parts_) {
    regex += part.is_group ? std::string(any) : re2::RE2::QuoteMeta(part.text);
    if (part.is_group) ++uses[part.group];
  }
  regex_ = compile(regex, true);
  const std::vector<std::string> globs =
      pattern.is_regex() ? std::vector<std::string>(1) : expand_braces(pattern.text());
  pattern_ = globs.front();
  if (pattern.is_regex())
    not_invertible_ = "its pattern is a regular expression";
  else if (globs.size() > 1)
    not_invertible_ = "its pattern has braces with several alternatives";
  else if (std::ranges::any_of(uses, [](std::size_t count) { return count > 1; }))
    not_invertible_ = "its new name has a star of the pattern twice";
  else if (std::ranges::count(uses, 0U) != 0)
    not_invertible_ = "its new name lacks a star of the pattern";
}

std::string NewName::apply(const std::vector<std::string_view>& captures) const {
  std::string name;
  for (const TemplatePart& part : parts_) name += part.is_group ? captures[part.group] : part.text;
  return name;
}

bool NewName::fits(std::string_view new_name) const {
  return re2::RE2::FullMatch(piece(new_name), *regex_);
}

std::string NewName::old_name(std::string_view new_name) const {
  if (!not_invertible_.empty()) throw Error(ErrorKind::invalid_argument, std::string(not_invertible_));
  const std::vector<std::string_view> found = groups_in(*regex_, new_name).value();
  std::vector<std::string_view> stars(found.size());
  std::size_t next = 0;
  for (const TemplatePart& part : parts_)
    if (part.is_group) stars[part.group] = found[next++];
  std::string name;
  next = 0;
  for (const char c : pattern_) {
    if (c == '*')
      name += stars[next++];
    else
      name += c;
  }
  return name;
}

// Sorts "layers.2." before "layers.10.", so that layers have the same order in files as in the model.
bool natural_less(std::string_view a, std::string_view b) {
  const std::string_view whole_a = a;
  const std::string_view whole_b = b;
  while (!a.empty() && !b.empty()) {
    if (is_digit(a[0]) && is_digit(b[0])) {
      const std::string_view x = take_number(a);
      const std::string_view y = take_number(b);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else if (a[0] != b[0]) {
      return a[0] < b[0];
    } else {
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  if (a.empty() != b.empty()) return a.empty();
  return whole_a < whole_b;  // "a01" and "a1" are different names
}

void check_numbering(const MergePlan& plan, const ParallelLayout& layout) {
  const auto check = [&](const std::optional<Numbering>& numbering, int parts, std::string_view key,
                         std::string_view what) {
    if (parts > 1 && !numbering)
      throw Error(
          ErrorKind::invalid_argument,
          fmt::format("plan {0}: the pattern for the number of {1} ({2}) is missing, and the layout {3} needs it",
                      in_quotes(plan.name()), what, in_quotes(key), to_string(layout)));
  };
  check(plan.layers(), layout.pipeline, "layers", "a layer");
  check(plan.experts(), layout.expert, "experts", "an expert");
}

void note_names(std::vector<std::string>& notes, const std::vector<std::string>& names, std::string_view words) {
  if (!names.empty()) notes.push_back(fmt::format("{} (one of {}): {}", in_quotes(names.front()), names.size(), words));
}

std::set<std::size_t> rules_used(const Arrangement& arrangement) {
  std::set<std::size_t> used;
  for (const ArrangedTensor& tensor : arrangement.tensors) used.insert(tensor.rule->number);
  for (const DroppedTensor& tensor : arrangement.dropped) used.insert(tensor.rule->number);
  return used;
}

void note_unused_rules(const MergePlan& plan, const std::set<std::size_t>& used, std::vector<std::string>& notes) {
  std::set<std::size_t> unused;
  for (const MergeRule& rule : plan.rules())
    if (!used.contains(rule.number) && !is_builtin_rule(rule)) unused.insert(rule.number);
  if (!unused.empty())
    notes.push_back(fmt::format("plan {}: no tensor has rule{} {}", in_quotes(plan.name()),
                                unused.size() == 1 ? "" : "s", fmt::join(unused, ", ")));
}

std::vector<std::string> weights_of_scale(std::string_view name) {
  for (const std::string_view part : {".weight_scale", ".weight_quantizer."})
    if (const std::size_t at = name.rfind(part); at != std::string_view::npos) {
      const std::string module(name.substr(0, at));
      return {module + ".weight", module + ".weight_packed"};
    }
  for (const std::string_view end : {".scales", ".qzeros"})
    if (name.ends_with(end)) return {std::string(name.substr(0, name.size() - end.size())) + ".qweight"};
  return {};
}

std::string some_names(std::vector<std::string> names) {
  std::ranges::sort(names, natural_less);
  std::string list;
  for (std::size_t i = 0; i < std::min(names.size(), most_names); ++i)
    list += (i == 0 ? "" : ", ") + in_quotes(names[i]);
  if (names.size() > most_names) list += fmt::format(" and {} more", names.size() - most_names);
  return list;
}

std::string no_rule_words(const MergePlan& plan, const std::vector<std::string>& names) {
  const bool is_of_heads = std::ranges::all_of(names, [](const std::string& name) {
    static const NumberPattern norm = NumberPattern::parse("*.self_attn.{q,k}_layernorm.norms.#.{weight,bias}");
    return norm.find(name).has_value();
  });
  return fmt::format("plan {}: no rule matches the tensor{} {}. {}", in_quotes(plan.name()),
                     names.size() == 1 ? "" : "s", some_names(names),
                     is_of_heads ? "Each is the norm of one head, and a plan cannot number the norms of a rank from 0. "
                                   "Export or convert the whole model"
                                 : "Add a rule, or use another plan");
}

}  // namespace muster
