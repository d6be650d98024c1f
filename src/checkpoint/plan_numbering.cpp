// SPDX-License-Identifier: Apache-2.0
// Numbers of layers and experts in names. The glob becomes a regular expression whose stars are lazy: so of several
// places that fit, the first is taken.

#include <fmt/core.h>
#include <re2/re2.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/plan_pattern.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

// At most 18 digits: they fit 63 bits. A number with a leading zero is no number: writing it again would change it.
constexpr std::string_view digits = "(0|[1-9][0-9]{0,17})";

std::string as_regex(std::string_view glob) {
  std::string regex;
  int depth = 0;
  for (const char c : glob) {
    if (c == '*') {
      regex += ".*?";
    } else if (c == '#') {
      regex += digits;
    } else if (c == '{') {
      ++depth;
      regex += "(?:";
    } else if (c == '}') {
      --depth;
      regex += ')';
    } else if (c == ',' && depth > 0) {
      regex += '|';
    } else {
      regex += re2::RE2::QuoteMeta(re2::StringPiece(&c, 1));
    }
  }
  return regex;
}

// Where the digits are; an empty view where the pattern does not fit.
std::string_view place(const re2::RE2& regex, std::string_view name) {
  std::array<re2::StringPiece, 2> found;
  if (!regex.Match(re2::StringPiece(name.data(), name.size()), 0, name.size(), re2::RE2::ANCHOR_BOTH, found.data(), 2))
    return {};
  return {found[1].data(), found[1].size()};
}

}  // namespace

NumberPattern NumberPattern::parse(std::string text) {
  check_pattern_length("pattern", text);
  const auto count = std::count(text.begin(), text.end(), '#');
  if (count != 1) {
    throw Error(ErrorKind::argument,
                fmt::format("the pattern {} has {} \"#\", not exactly one for the number", in_quotes(text), count));
  }
  expand_braces(text);  // for what it throws
  const std::string before = text.substr(0, text.find('#'));
  // Inside braces it would be missing from some of what they mean.
  if (std::count(before.begin(), before.end(), '{') != std::count(before.begin(), before.end(), '}')) {
    throw Error(ErrorKind::argument, fmt::format("the pattern {} has its \"#\" inside braces", in_quotes(text)));
  }
  NumberPattern pattern;
  pattern.regex_ = compile_regex(as_regex(text), true);
  pattern.text_ = std::move(text);
  return pattern;
}

std::optional<std::int64_t> NumberPattern::find(std::string_view name) const {
  const std::string_view found = place(*regex_, name);
  if (found.empty()) return std::nullopt;
  std::int64_t number = 0;
  std::from_chars(found.data(), found.data() + found.size(), number);
  return number;
}

std::string NumberPattern::replace(std::string_view name, std::int64_t number) const {
  const std::string_view found = place(*regex_, name);
  if (found.empty()) {
    throw Error(ErrorKind::argument, fmt::format("the tensor {} has no number where the pattern {} looks for one",
                                                 in_quotes(name), in_quotes(text_)));
  }
  const auto at = static_cast<std::size_t>(found.data() - name.data());
  return fmt::format("{}{}{}", name.substr(0, at), number, name.substr(at + found.size()));
}

}  // namespace muster
