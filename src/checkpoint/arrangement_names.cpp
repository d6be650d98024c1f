// SPDX-License-Identifier: Apache-2.0
// Names of tensors: their order, which belongs to which, and how messages list them.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/plan_parts.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

constexpr std::size_t most_names = 10;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// The digits at the front of `text`, without leading zeros, taken off.
std::string_view take_number(std::string_view& text) {
  std::size_t end = 0;
  while (end < text.size() && is_digit(text[end])) ++end;
  std::string_view number = text.substr(0, end);
  text.remove_prefix(end);
  number.remove_prefix(std::min(number.find_first_not_of('0'), number.size()));
  return number;
}

}  // namespace

// "layers.2." before "layers.10.": layers that follow each other in the model do so in the files.
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
  return whole_a < whole_b;  // "a01" and "a1" are two names
}

void note_unused_rules(const MergePlan& plan, Arrangement& arrangement) {
  std::set<std::size_t> used;
  for (const ArrangedTensor& tensor : arrangement.tensors) used.insert(tensor.rule->number);
  for (const DroppedTensor& tensor : arrangement.dropped) used.insert(tensor.rule->number);
  std::vector<std::size_t> unused;
  for (const MergeRule& rule : plan.rules())
    if (!used.contains(rule.number) && !is_builtin_rule(rule)) unused.push_back(rule.number);
  if (!unused.empty())
    arrangement.notes.push_back(fmt::format("plan {}: no tensor has rule{} {}", in_quotes(plan.name()),
                                            unused.size() == 1 ? "" : "s", fmt::join(unused, ", ")));
}

std::optional<std::string> weight_of_scale(std::string_view name) {
  for (const std::string_view part : {".weight_scale", ".weight_quantizer."})
    if (const std::size_t at = name.rfind(part); at != std::string_view::npos)
      return std::string(name.substr(0, at)) + ".weight";
  return std::nullopt;
}

std::string some_names(std::vector<std::string> names) {
  std::ranges::sort(names, natural_less);
  names.erase(std::unique(names.begin(), names.end()), names.end());
  std::string list;
  for (std::size_t i = 0; i < std::min(names.size(), most_names); ++i)
    list += (i == 0 ? "" : ", ") + in_quotes(names[i]);
  if (names.size() > most_names) list += fmt::format(" and {} more", names.size() - most_names);
  return list;
}

std::string no_rule_words(const MergePlan& plan, const std::vector<std::string>& names) {
  return fmt::format("plan {}: no rule matches the tensor{} {}; add one, or take another plan", in_quotes(plan.name()),
                     names.size() == 1 ? "" : "s", some_names(names));
}

}  // namespace muster
