// SPDX-License-Identifier: Apache-2.0
// Renaming both ways. Backwards a name is found by turning the new name's template into a glob; what comes out is only
// believed when it gives the same name forwards, by the same rule.

#include "src/checkpoint/plan_rename.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <variant>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/plan_pattern.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

std::vector<RenamePart> parts_of(const MergeRule& rule) {
  return parse_rename(rule.rename, rule.pattern.groups().value_or(0));
}

// What the template's groups are in a new name that it fits; empty for those that it lacks.
struct Turned {
  bool fits = false;
  bool has_twice = false;
  std::vector<std::optional<std::string_view>> groups;
};

Turned turn_around(const std::vector<RenamePart>& parts, std::size_t groups, std::string_view result) {
  // A literal star in a new name would be a wildcard in its glob: it may fit too much, and is told apart afterwards.
  std::string glob;
  std::vector<std::size_t> order;  // which group each star is; npos: a literal one
  for (const RenamePart& part : parts) {
    if (part.is_group) {
      glob += '*';
      order.push_back(part.group);
    } else {
      glob += part.text;
      order.insert(order.end(), static_cast<std::size_t>(std::count(part.text.begin(), part.text.end(), '*')),
                   std::string_view::npos);
    }
  }
  std::vector<std::string_view> stars;
  Turned turned;
  if (!glob_matches(glob, result, &stars)) return turned;
  turned.fits = true;
  turned.groups.resize(groups);
  for (std::size_t i = 0; i < order.size(); ++i)
    if (order[i] != std::string_view::npos) {
      turned.has_twice = turned.has_twice || turned.groups[order[i]].has_value();
      turned.groups[order[i]] = stars[i];
    }
  return turned;
}

// Why there is no way back from a name that fits; empty where there is one.
std::string_view not_turnable(const MergeRule& rule, const Turned& turned) {
  if (rule.pattern.is_regex()) return "its pattern is a regular expression";
  if (rule.pattern.globs().size() != 1) return "its pattern has braces";
  if (turned.has_twice) return "its new name has a star of the pattern twice";
  const bool has_all = std::all_of(turned.groups.begin(), turned.groups.end(), [](const auto& g) { return g; });
  return has_all ? "" : "its new name lacks a star of the pattern";
}

// The old name, from a glob without braces.
std::string fill(std::string_view glob, const std::vector<std::optional<std::string_view>>& groups) {
  std::string name;
  std::size_t star = 0;
  for (const char c : glob) {
    if (c == '*')
      name += *groups[star++];
    else
      name += c;
  }
  return name;
}

}  // namespace

std::vector<RenamePart> parse_rename(std::string_view rename, std::size_t groups) {
  std::vector<RenamePart> parts;
  const auto literal = [&]() -> std::string& {
    if (parts.empty() || parts.back().is_group) parts.push_back({});
    return parts.back().text;
  };
  for (std::size_t at = 0; at < rename.size();) {
    if (rename[at] != '$') {
      literal() += rename[at++];
      continue;
    }
    if (rename.substr(at, 2) == "$$") {
      literal() += '$';
      at += 2;
      continue;
    }
    std::size_t number = 0;
    const char* begin = rename.data() + at + 1;
    const auto [end, status] = std::from_chars(begin, rename.data() + rename.size(), number);
    if (end == begin) {
      throw Error(ErrorKind::argument,
                  fmt::format("the new name {} has a \"$\" without a number; \"$$\" is a dollar", in_quotes(rename)));
    }
    if (status != std::errc() || number < 1 || number > groups) {
      throw Error(ErrorKind::argument,
                  fmt::format("the new name {} has \"${}\", and its pattern has {} star{} or group{}",
                              in_quotes(rename), std::string_view(begin, static_cast<std::size_t>(end - begin)), groups,
                              groups == 1 ? "" : "s", groups == 1 ? "" : "s"));
    }
    parts.push_back({{}, number - 1, true});
    at = static_cast<std::size_t>(end - rename.data());
  }
  return parts;
}

std::string MergePlan::renamed(const MergeRule& rule, std::string_view tensor) {
  if (rule.rename.empty()) return std::string(tensor);
  const std::optional<std::vector<std::string_view>> groups = rule.pattern.captures(tensor);
  if (!groups) {
    throw Error(ErrorKind::argument, fmt::format("rule {} renames, but its pattern {} does not fit the tensor {}",
                                                 rule.number, in_quotes(rule.pattern.text()), in_quotes(tensor)));
  }
  std::string name;
  for (const RenamePart& part : parts_of(rule)) {
    if (part.is_group)
      name += (*groups)[part.group];
    else
      name += part.text;
  }
  return name;
}

std::optional<MergePlan::Origin> MergePlan::origin(std::string_view result) const {
  for (const MergeRule& rule : rules_) {
    if (std::holds_alternative<DropAction>(rule.action)) continue;
    std::string name(result);
    if (!rule.rename.empty()) {
      const Turned turned = turn_around(parts_of(rule), rule.pattern.groups().value_or(0), result);
      if (!turned.fits) continue;
      if (const std::string_view why = not_turnable(rule, turned); !why.empty()) {
        throw Error(ErrorKind::argument,
                    fmt::format("plan {}: rule {} gives the tensor {} its name, and cannot be turned around: {}",
                                in_quotes(name_), rule.number, in_quotes(result), why));
      }
      name = fill(rule.pattern.globs().front(), turned.groups);
    } else if (!rule.pattern.matches(result)) {
      continue;
    }
    if (find(name) == &rule && renamed(rule, name) == result) return Origin{std::move(name), &rule};
  }
  return std::nullopt;
}

}  // namespace muster
