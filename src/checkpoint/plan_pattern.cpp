// SPDX-License-Identifier: Apache-2.0
// Patterns over tensor names. Globs cover nearly all plans; regular expressions are for the rest.

#include "src/checkpoint/plan_pattern.hpp"

#include <fmt/core.h>
#include <re2/re2.h>

#include <algorithm>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

constexpr std::size_t most_globs = 256;

}  // namespace

void check_pattern_length(std::string_view what, std::string_view text) {
  if (text.size() > longest_pattern) {
    throw Error(ErrorKind::argument,
                fmt::format("a {} of {} characters; at most {} are read", what, text.size(), longest_pattern));
  }
}

std::vector<std::string> expand_braces(const std::string& text) {
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

bool glob_matches(std::string_view glob, std::string_view name, std::vector<std::string_view>* stars) {
  std::size_t g = 0;
  std::size_t n = 0;
  std::size_t star = std::string_view::npos;  // the last star met, and where its text began and ends
  std::size_t begun = 0;
  std::size_t ended = 0;
  const auto keep = [&] {
    if (stars != nullptr && star != std::string_view::npos) stars->push_back(name.substr(begun, ended - begun));
  };
  if (stars != nullptr) stars->clear();
  while (n < name.size()) {
    if (g < glob.size() && glob[g] == '*') {
      keep();
      star = g++;
      begun = ended = n;
    } else if (g < glob.size() && glob[g] == name[n]) {
      ++g;
      ++n;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      n = ++ended;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') {
    keep();
    star = g++;
    begun = ended = n;
  }
  if (g != glob.size()) return false;
  keep();
  return true;
}

std::shared_ptr<const re2::RE2> compile_regex(const std::string& text, bool bytes) {
  // RE2 takes linear time; std::regex backtracks, so that forty characters of a plan could keep it busy for years.
  re2::RE2::Options options;
  options.set_log_errors(false);
  options.set_max_mem(1 << 20);
  if (bytes) {
    options.set_encoding(re2::RE2::Options::EncodingLatin1);
    options.set_dot_nl(true);
  }
  auto regex = std::make_shared<re2::RE2>(text, options);
  if (!regex->ok())
    throw Error(ErrorKind::argument,
                fmt::format("the regular expression {} cannot be read: {}", in_quotes(text), regex->error()));
  return regex;
}

TensorPattern TensorPattern::glob(std::string text) {
  check_pattern_length("pattern", text);
  TensorPattern pattern;
  pattern.globs_ = expand_braces(text);
  pattern.text_ = std::move(text);
  return pattern;
}

TensorPattern TensorPattern::regex(std::string text) {
  check_pattern_length("regular expression", text);
  TensorPattern pattern;
  pattern.regex_ = compile_regex(text, false);
  pattern.text_ = std::move(text);
  return pattern;
}

bool TensorPattern::matches(std::string_view name) const {
  if (regex_) return re2::RE2::FullMatch(re2::StringPiece(name.data(), name.size()), *regex_);
  return std::any_of(globs_.begin(), globs_.end(), [&](const std::string& g) { return glob_matches(g, name); });
}

std::optional<std::size_t> TensorPattern::groups() const {
  if (regex_) return static_cast<std::size_t>(regex_->NumberOfCapturingGroups());
  const auto stars = [](const std::string& glob) {
    return static_cast<std::size_t>(std::count(glob.begin(), glob.end(), '*'));
  };
  const std::size_t count = stars(globs_.front());
  const bool agree = std::all_of(globs_.begin(), globs_.end(), [&](const std::string& g) { return stars(g) == count; });
  return agree ? std::optional(count) : std::nullopt;
}

std::optional<std::vector<std::string_view>> TensorPattern::captures(std::string_view name) const {
  std::vector<std::string_view> parts;
  if (!regex_) {
    for (const std::string& glob : globs_)
      if (glob_matches(glob, name, &parts)) return parts;
    return std::nullopt;
  }
  const int count = regex_->NumberOfCapturingGroups() + 1;  // the first is the whole name
  std::vector<re2::StringPiece> found(static_cast<std::size_t>(count));
  if (!regex_->Match(re2::StringPiece(name.data(), name.size()), 0, name.size(), re2::RE2::ANCHOR_BOTH, found.data(),
                     count))
    return std::nullopt;
  for (std::size_t i = 1; i < found.size(); ++i) parts.emplace_back(found[i].data(), found[i].size());
  return parts;
}

}  // namespace muster
