// SPDX-License-Identifier: Apache-2.0
// Rules that no tensor can come to. Whoever wrote one meant something else by an earlier one.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "muster/error.hpp"
#include "src/checkpoint/plan_json.hpp"
#include "src/checkpoint/plan_pattern.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

// Comparing all pairs takes squared time, which a hostile plan would make minutes: beyond this many products of lengths
// only patterns that are the same are found.
constexpr std::size_t most_work = std::size_t{1} << 29;

[[noreturn]] void refuse(const MergeRule& rule, std::size_t line, const std::string& words) {
  throw Error(ErrorKind::corrupt, fmt::format("rule {} (line {}): {}", rule.number, line, words));
}

bool takes_all(const TensorPattern& pattern) {
  if (pattern.is_regex()) return pattern.text() == ".*" || pattern.text() == "(.*)";
  return std::any_of(pattern.globs().begin(), pattern.globs().end(), [](const std::string& glob) {
    return !glob.empty() && glob.find_first_not_of('*') == std::string::npos;
  });
}

struct Seen {
  std::string_view glob;
  std::size_t rule;
};

// One glob fits all that another does where it fits the other's text: the other's stars are characters there that only
// its own stars can fit.
const Seen* covering(const std::vector<Seen>& seen, std::string_view glob, std::size_t& work) {
  for (const Seen& earlier : seen) {
    work += earlier.glob.size() * glob.size();
    if (work > most_work) return nullptr;
    if (glob_matches(earlier.glob, glob)) return &earlier;
  }
  return nullptr;
}

}  // namespace

void check_reachable(const std::vector<MergeRule>& rules, const std::vector<std::size_t>& lines) {
  std::map<std::pair<bool, std::string_view>, std::size_t> texts;
  std::vector<Seen> seen;
  std::optional<std::size_t> all;  // a rule that takes everything
  std::size_t work = 0;
  for (std::size_t i = 0; i < rules.size(); ++i) {
    const TensorPattern& pattern = rules[i].pattern;
    const auto [same, fresh] = texts.try_emplace({pattern.is_regex(), pattern.text()}, rules[i].number);
    if (!fresh)
      refuse(rules[i], lines[i], fmt::format("it has the pattern of rule {}, so it is never reached", same->second));
    if (all) refuse(rules[i], lines[i], fmt::format("rule {} takes all tensors, so it is never reached", *all));
    if (takes_all(pattern)) all = rules[i].number;

    // The rules that take it all away, for the message at most the first few.
    std::vector<std::size_t> by;
    bool is_covered = !pattern.globs().empty();
    for (const std::string& glob : pattern.globs()) {
      const Seen* earlier = is_covered ? covering(seen, glob, work) : nullptr;
      if (earlier == nullptr) {
        is_covered = false;
        break;
      }
      by.push_back(earlier->rule);
    }
    if (is_covered) {
      std::sort(by.begin(), by.end());
      by.erase(std::unique(by.begin(), by.end()), by.end());
      std::string list;
      for (std::size_t k = 0; k < std::min<std::size_t>(by.size(), 5); ++k)
        list += fmt::format("{}{}", k == 0 ? "" : ", ", by[k]);
      refuse(rules[i], lines[i],
             fmt::format("the pattern {} is never reached: rule{} {} take{} all that it fits",
                         in_quotes(pattern.text()), by.size() == 1 ? "" : "s", list, by.size() == 1 ? "s" : ""));
    }
    for (const std::string& glob : pattern.globs()) seen.push_back({glob, rules[i].number});
  }
}

}  // namespace muster
