// SPDX-License-Identifier: Apache-2.0
// Patterns over tensor names. Globs cover nearly all plans; regular expressions are for the rest.

#include <fmt/format.h>
#include <re2/re2.h>

#include <algorithm>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/checkpoint/quoted.hpp"

namespace muster {
namespace {

constexpr std::size_t most_globs = 256;
constexpr std::size_t longest_regex = 1024;
// The braces of `text`, multiplied out.
std::vector<std::string> expand(const std::string& text) {
  std::vector<std::string> globs(1);
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == '}') {
      throw Error(ErrorKind::argument,
                  fmt::format("the pattern {} closes a brace that it never opened", in_quotes(text)));
    }
    if (text[at] != '{') {
      const std::size_t end = std::min(text.find_first_of("{}", at), text.size());
      for (std::string& glob : globs) glob.append(text, at, end - at);
      at = end;
      continue;
    }
    const std::size_t close = text.find_first_of("{}", at + 1);
    if (close == std::string::npos || text[close] == '{') {
      throw Error(ErrorKind::argument,
                  fmt::format("the pattern {} {}", in_quotes(text),
                              close == std::string::npos ? "never closes a brace" : "has braces inside braces"));
    }
    std::vector<std::string> longer;
    for (std::size_t begin = at + 1; begin <= close;) {
      const std::size_t end = std::min(text.find(',', begin), close);
      if (longer.size() + globs.size() > most_globs) {
        throw Error(ErrorKind::argument, fmt::format("the braces of the pattern {} mean more than {} patterns",
                                                     in_quotes(text), most_globs));
      }
      for (const std::string& glob : globs) longer.push_back(glob + text.substr(begin, end - begin));
      begin = end + 1;
    }
    globs = std::move(longer);
    at = close + 1;
  }
  return globs;
}

bool glob_matches(std::string_view glob, std::string_view name) noexcept {
  std::size_t g = 0;
  std::size_t n = 0;
  std::size_t star = std::string_view::npos;  // the last star met, and where its text began
  std::size_t begun = 0;
  while (n < name.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      begun = n;
    } else if (g < glob.size() && glob[g] == name[n]) {
      ++g;
      ++n;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      n = ++begun;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

}  // namespace

TensorPattern TensorPattern::glob(std::string text) {
  TensorPattern pattern;
  pattern.globs_ = expand(text);
  pattern.text_ = std::move(text);
  return pattern;
}

TensorPattern TensorPattern::regex(std::string text) {
  if (text.size() > longest_regex) {
    throw Error(ErrorKind::argument,
                fmt::format("a regular expression of {} characters; at most {} are read", text.size(), longest_regex));
  }
  // RE2 takes linear time; std::regex backtracks, so that forty characters of a plan could keep it busy for years.
  re2::RE2::Options options;
  options.set_log_errors(false);
  options.set_max_mem(1 << 20);
  TensorPattern pattern;
  auto regex = std::make_shared<re2::RE2>(text, options);
  if (!regex->ok())
    throw Error(ErrorKind::argument,
                fmt::format("the regular expression {} cannot be read: {}", in_quotes(text), regex->error()));
  pattern.regex_ = std::move(regex);
  pattern.text_ = std::move(text);
  return pattern;
}

bool TensorPattern::matches(std::string_view name) const {
  if (regex_) return re2::RE2::FullMatch(re2::StringPiece(name.data(), name.size()), *regex_);
  return std::any_of(globs_.begin(), globs_.end(), [&](const std::string& g) { return glob_matches(g, name); });
}

}  // namespace muster
