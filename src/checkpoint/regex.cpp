// SPDX-License-Identifier: Apache-2.0
// Text to tree, tree to a program for a machine that follows all ways at once (Thompson 1968): each instruction is
// visited at most once for a character.

#include "src/checkpoint/regex.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "muster/error.hpp"

namespace muster {

// A repetition is its body written out, so the program is bounded, and with it the time for a character.
class RegexCompiler {
 public:
  explicit RegexCompiler(std::string_view text) : text_(text) {}

  void compile(Regex& regex) {
    const Node tree = alternatives(0);
    if (at_ != text_.size()) refuse("closes a group that it never opened");
    emit(regex, tree);
    add(regex, {Regex::Op::match, 0, 0});
  }

 private:
  static constexpr std::size_t most_instructions = 20'000;
  static constexpr int deepest = 64;
  static constexpr std::uint32_t unlimited = ~std::uint32_t{0};
  static constexpr std::uint32_t most_repeats = 1000;

  using Set = Regex::Set;
  using Op = Regex::Op;
  struct Node {
    enum class Kind : std::uint8_t { sequence, alternatives, set, repeat, begin, end } kind = Kind::sequence;
    std::vector<Node> parts = {};
    Set set = {};
    std::uint32_t least = 0;
    std::uint32_t most = 0;
  };

  [[noreturn]] static void refuse(const std::string& words) { throw Error(ErrorKind::argument, words); }

  [[nodiscard]] bool more() const { return at_ < text_.size(); }
  [[nodiscard]] char peek() const { return text_[at_]; }
  bool take(char c) {
    if (!more() || peek() != c) return false;
    ++at_;
    return true;
  }
  char next(const char* what) {
    if (!more()) refuse(fmt::format("ends inside {}", what));
    return text_[at_++];
  }

  Node alternatives(int depth) {
    if (depth > deepest) refuse(fmt::format("nests groups deeper than {}", deepest));
    Node node{Node::Kind::alternatives};
    do {
      node.parts.push_back(sequence(depth));
    } while (take('|'));
    return node;
  }

  Node sequence(int depth) {
    Node node;
    while (more() && peek() != '|' && peek() != ')') {
      Node part = atom(depth);
      node.parts.push_back(quantified(std::move(part)));
    }
    return node;
  }

  Node atom(int depth) {
    const char c = next("it");
    switch (c) {
      case '(': {
        if (take('?') && !take(':')) refuse("has a look-ahead or a named group, which are not known here");
        Node group = alternatives(depth + 1);
        if (!take(')')) refuse("never closes a group");
        return group;
      }
      case '[':
        return set_node(character_class());
      case '.':
        return set_node(~(one('\n') | one('\r')));
      case '^':
        return Node{Node::Kind::begin};
      case '$':
        return Node{Node::Kind::end};
      case '\\':
        return set_node(escape());
      case '*':
      case '+':
      case '?':
      case '{':
        refuse(fmt::format("has a '{}' with nothing before it to repeat", c));
      default:
        return set_node(one(c));
    }
  }

  Node quantified(Node part) {
    std::uint32_t least = 0;
    std::uint32_t most = unlimited;
    if (take('*')) {
    } else if (take('+')) {
      least = 1;
    } else if (take('?')) {
      most = 1;
    } else if (take('{')) {
      least = number();
      most = take(',') ? (more() && peek() == '}' ? unlimited : number()) : least;
      if (!take('}')) refuse("never closes the braces of a repetition");
      if (most < least) refuse("has a repetition whose bounds are the wrong way round");
    } else {
      return part;
    }
    take('?');  // lazy or greedy: the whole text has to match either way
    if (more() && (peek() == '*' || peek() == '+' || peek() == '?' || peek() == '{')) refuse("repeats a repetition");
    if (part.kind == Node::Kind::begin || part.kind == Node::Kind::end) refuse("repeats an anchor");
    Node node{Node::Kind::repeat};
    node.parts.push_back(std::move(part));
    node.least = least;
    node.most = most;
    return node;
  }

  std::uint32_t number() {
    std::uint32_t value = 0;
    const std::size_t begin = at_;
    while (more() && peek() >= '0' && peek() <= '9') {
      value = value * 10 + static_cast<std::uint32_t>(peek() - '0');
      if (value > most_repeats) refuse(fmt::format("repeats more than {} times", most_repeats));
      ++at_;
    }
    if (at_ == begin) refuse("has braces without a number");
    return value;
  }

  static Set one(char c) {
    Set set;
    set.set(static_cast<unsigned char>(c));
    return set;
  }
  static Set range(unsigned char first, unsigned char last) {
    Set set;
    for (unsigned c = first; c <= last; ++c) set.set(c);
    return set;
  }
  static Node set_node(Set set) {
    Node node{Node::Kind::set};
    node.set = set;
    return node;
  }

  Set escape() {
    const char c = next("an escape");
    const Set digits = range('0', '9');
    const Set words = digits | range('a', 'z') | range('A', 'Z') | one('_');
    const Set spaces = one(' ') | range('\t', '\r');
    switch (c) {
      case 'd':
        return digits;
      case 'D':
        return ~digits;
      case 'w':
        return words;
      case 'W':
        return ~words;
      case 's':
        return spaces;
      case 'S':
        return ~spaces;
      case 't':
        return one('\t');
      case 'n':
        return one('\n');
      case 'r':
        return one('\r');
      case 'f':
        return one('\f');
      case 'v':
        return one('\v');
      default:
        if (words.test(static_cast<unsigned char>(c))) {
          refuse(fmt::format("has the escape \\{}, which is not known here", c));
        }
        return one(c);
    }
  }

  Set character_class() {
    const bool inverted = take('^');
    Set all;
    while (!take(']')) {
      const Set first = class_member();
      if (first.count() == 1 && at_ + 1 < text_.size() && peek() == '-' && text_[at_ + 1] != ']') {
        ++at_;
        const Set last = class_member();
        const unsigned char from = only(first);
        if (last.count() != 1 || only(last) < from) refuse("has a range of characters that is none");
        all |= range(from, only(last));
      } else {
        all |= first;
      }
    }
    return inverted ? ~all : all;
  }

  Set class_member() {
    const char c = next("a class of characters");
    return c == '\\' ? escape() : one(c);
  }

  static unsigned char only(const Set& set) {
    unsigned c = 0;
    while (!set.test(c)) ++c;
    return static_cast<unsigned char>(c);
  }

  static std::uint32_t add(Regex& regex, Regex::Instruction instruction) {
    if (regex.program_.size() >= most_instructions) refuse("is too large when its repetitions are written out");
    regex.program_.push_back(instruction);
    return static_cast<std::uint32_t>(regex.program_.size() - 1);
  }
  static std::uint32_t here(const Regex& regex) { return static_cast<std::uint32_t>(regex.program_.size()); }

  static void emit(Regex& regex, const Node& node) {
    switch (node.kind) {
      case Node::Kind::sequence:
        for (const Node& part : node.parts) emit(regex, part);
        break;
      case Node::Kind::alternatives:
        emit_alternatives(regex, node);
        break;
      case Node::Kind::set:
        add(regex, {Op::set, set_place(regex, node.set), 0});
        break;
      case Node::Kind::repeat:
        emit_repeat(regex, node);
        break;
      case Node::Kind::begin:
        add(regex, {Op::at_begin, 0, 0});
        break;
      case Node::Kind::end:
        add(regex, {Op::at_end, 0, 0});
        break;
    }
  }

  static std::uint32_t set_place(Regex& regex, const Set& set) {
    auto found = std::find(regex.sets_.begin(), regex.sets_.end(), set);
    if (found == regex.sets_.end()) found = regex.sets_.insert(found, set);
    return static_cast<std::uint32_t>(found - regex.sets_.begin());
  }

  static void emit_alternatives(Regex& regex, const Node& node) {
    std::vector<std::uint32_t> ends;
    for (std::size_t i = 0; i < node.parts.size(); ++i) {
      if (i + 1 == node.parts.size()) {
        emit(regex, node.parts[i]);
        break;
      }
      const std::uint32_t fork = add(regex, {Op::fork, here(regex) + 1, 0});
      emit(regex, node.parts[i]);
      ends.push_back(add(regex, {Op::jump, 0, 0}));
      regex.program_[fork].b = here(regex);
    }
    for (const std::uint32_t end : ends) regex.program_[end].a = here(regex);
  }

  static void emit_repeat(Regex& regex, const Node& node) {
    const Node& body = node.parts.front();
    for (std::uint32_t i = 0; i < node.least; ++i) {
      const std::uint32_t before = here(regex);
      emit(regex, body);
      if (here(regex) == before) break;  // nothing, a thousand times a thousand times, is nothing
    }
    if (node.most == unlimited) {
      const std::uint32_t fork = add(regex, {Op::fork, here(regex) + 1, 0});
      emit(regex, body);
      add(regex, {Op::jump, fork, 0});
      regex.program_[fork].b = here(regex);
      return;
    }
    std::vector<std::uint32_t> forks;
    for (std::uint32_t i = node.least; i < node.most; ++i) {
      forks.push_back(add(regex, {Op::fork, here(regex) + 1, 0}));
      emit(regex, body);
    }
    for (const std::uint32_t fork : forks) regex.program_[fork].b = here(regex);
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

Regex::Regex(std::string_view text) {
  RegexCompiler(text).compile(*this);
}

bool Regex::matches(std::string_view text) const {
  std::vector<std::uint32_t> current;
  std::vector<std::uint32_t> following;
  std::vector<std::uint32_t> open;                                  // ways still to be looked at
  std::vector<std::size_t> seen(program_.size(), text.size() + 1);  // the position an instruction was last reached at
  bool matched = false;
  const auto reach = [&](std::uint32_t start, std::size_t at, std::vector<std::uint32_t>& reached) {
    open.push_back(start);
    while (!open.empty()) {
      const std::uint32_t place = open.back();
      open.pop_back();
      if (seen[place] == at) continue;
      seen[place] = at;
      const Instruction& instruction = program_[place];
      switch (instruction.op) {
        case Op::set:
          reached.push_back(place);
          break;
        case Op::fork:
          open.push_back(instruction.b);
          open.push_back(instruction.a);
          break;
        case Op::jump:
          open.push_back(instruction.a);
          break;
        case Op::at_begin:
          if (at == 0) open.push_back(place + 1);
          break;
        case Op::at_end:
          if (at == text.size()) open.push_back(place + 1);
          break;
        case Op::match:
          matched = matched || at == text.size();
          break;
      }
    }
  };
  reach(0, 0, current);
  for (std::size_t at = 0; at < text.size() && !current.empty(); ++at) {
    following.clear();
    for (const std::uint32_t place : current) {
      if (sets_[program_[place].a].test(static_cast<unsigned char>(text[at]))) reach(place + 1, at + 1, following);
    }
    current.swap(following);
  }
  return matched;
}

}  // namespace muster
