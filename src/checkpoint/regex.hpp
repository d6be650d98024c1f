// SPDX-License-Identifier: Apache-2.0
#pragma once
// Regular expressions over tensor names in time that grows with the name, never faster: std::regex backtracks, so that
// forty characters of a plan could keep it busy for years or end the stack.

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace muster {

/// ECMAScript's syntax: literals, `.`, classes, `\d \w \s` and their opposites, groups, `|`, `* + ? {m,n}`, `^` and
/// `$`. Back-references, look-ahead and `\b` are refused. Over bytes: a character beyond ASCII is its UTF-8 bytes.
class Regex {
 public:
  /// Throws Error(argument) that says what is wrong, without the text itself.
  explicit Regex(std::string_view text);

  /// Whether the whole of `text` matches.
  [[nodiscard]] bool matches(std::string_view text) const;

 private:
  friend class RegexCompiler;
  using Set = std::bitset<256>;
  enum class Op : std::uint8_t { set, fork, jump, at_begin, at_end, match };
  struct Instruction {
    Op op = Op::match;
    std::uint32_t a = 0;  // the set's place, or where to go on
    std::uint32_t b = 0;  // fork: the other way
  };
  std::vector<Instruction> program_;
  std::vector<Set> sets_;
};

}  // namespace muster
