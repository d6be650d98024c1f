// SPDX-License-Identifier: Apache-2.0
// The virtual machine that executes pickles. Its two dangerous instructions (import and call) create nodes instead. It
// has a stack, marks in the stack, and a memo.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/formats/pickle.hpp"

namespace muster::formats {
namespace {

constexpr std::uint64_t most_opcodes = 50'000'000;
constexpr std::uint64_t longest_pickle = std::uint64_t{1} << 30;
constexpr std::size_t memo_slack = 64;
// Nodes that all pickles share: None, False, True, the empty tuple, and the integers of one byte.
constexpr std::uint32_t none_node = 0;
constexpr std::uint32_t false_node = 1;
constexpr std::uint32_t empty_tuple_node = 3;
constexpr std::uint32_t first_number_node = 4;

/// Returns whether a name is one that runs programs. The check only gives an early and clear error: no name is ever
/// called.
bool runs_programs(std::string_view module, std::string_view name) {
  static const std::unordered_set<std::string_view> modules = {"os",
                                                               "posix",
                                                               "nt",
                                                               "sys",
                                                               "subprocess",
                                                               "importlib",
                                                               "runpy",
                                                               "ctypes",
                                                               "_ctypes",
                                                               "shutil",
                                                               "socket",
                                                               "pty",
                                                               "code",
                                                               "codeop",
                                                               "pip",
                                                               "pickle",
                                                               "_pickle",
                                                               "webbrowser",
                                                               "asyncio",
                                                               "timeit",
                                                               "bdb",
                                                               "pdb",
                                                               "multiprocessing",
                                                               "cPickle",
                                                               "commands",
                                                               "cProfile",
                                                               "profile",
                                                               "doctest",
                                                               "torch.hub",
                                                               "platform",
                                                               "pydoc",
                                                               "_posixsubprocess",
                                                               "marshal",
                                                               "imp",
                                                               "venv",
                                                               "ensurepip",
                                                               "http",
                                                               "urllib"};
  // Functions that execute text or call something. Types and exceptions are only names.
  static const std::unordered_set<std::string_view> builtins = {
      "eval",    "exec",       "execfile", "compile", "__import__", "reload", "open", "file",
      "input",   "raw_input",  "apply",    "map",     "globals",    "locals", "vars", "setattr",
      "delattr", "breakpoint", "exit",     "quit",    "filter",     "reduce"};
  if (module == "builtins" || module == "__builtin__") return builtins.contains(name);
  return modules.contains(module) || modules.contains(module.substr(0, module.find('.')));
}

}  // namespace

class PickleMachine {
 public:
  explicit PickleMachine(std::span<const std::byte> bytes)
      : begin_(reinterpret_cast<const char*>(bytes.data())), at_(begin_), end_(begin_ + bytes.size()) {
    if (bytes.size() > longest_pickle)
      throw Error(ErrorKind::unsupported,
                  fmt::format("the pickle has {} bytes, and the limit is {}. Save the tensors with safetensors",
                              bytes.size(), longest_pickle));
    pickle_.bytes_ = begin_;
    push_node({PickleKind::none});
    for (std::uint32_t value = 0; value < 2; ++value) push_node({PickleKind::boolean, 0, value});
    push_node({PickleKind::tuple});
    for (std::uint32_t value = 0; value < 256; ++value) push_node({PickleKind::integer, 0, value});
    stack_.clear();
  }

  Pickle run(std::size_t* used) {
    const unsigned char first = next("the protocol");
    const unsigned char protocol = next("the protocol");
    if (first != 0x80 || protocol < 2 || protocol > 5) refuse("not a pickle of protocol 2 to 5");
    for (std::uint64_t count = 0; step(next("an opcode")); ++count)
      if (count == most_opcodes)
        throw Error(
            ErrorKind::unsupported,
            fmt::format("the pickle has more than {} opcodes. Save the tensors with safetensors", most_opcodes));
    if (stack_.size() != 1 || !marks_.empty()) refuse("the pickle does not end with exactly one object");
    if (used != nullptr)
      *used = static_cast<std::size_t>(at_ - begin_);
    else if (at_ != end_)
      refuse("bytes follow the end of the pickle");
    pickle_.root_ = stack_.back();
    check_keys();
    return std::move(pickle_);
  }

 private:
  using Ref = Pickle::Ref;
  using Node = Pickle::Node;

  [[noreturn]] void refuse(std::string_view what) const {
    throw Error(ErrorKind::corrupt, fmt::format("{} (at byte {} of {})", what, at_ - begin_, end_ - begin_));
  }

  std::string_view take(std::uint64_t length, std::string_view what) {
    if (length > static_cast<std::uint64_t>(end_ - at_)) refuse(fmt::format("the pickle is truncated within {}", what));
    const std::string_view part(at_, length);
    at_ += length;
    return part;
  }
  unsigned char next(std::string_view what) { return static_cast<unsigned char>(take(1, what)[0]); }
  template <class Number>
  Number number() {
    Number value{};
    std::memcpy(&value, take(sizeof value, "a number").data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const void* end = std::memchr(at_, '\n', static_cast<std::size_t>(end_ - at_));
    if (end == nullptr) refuse("the pickle is truncated within a name");
    const std::string_view text(at_, static_cast<std::size_t>(static_cast<const char*>(end) - at_));
    at_ += text.size() + 1;
    return text;
  }

  Ref push_node(const Node& node) {
    pickle_.nodes_.push_back(node);
    stack_.push_back(static_cast<Ref>(pickle_.nodes_.size() - 1));
    return stack_.back();
  }
  void push_integer(std::int64_t value) {
    if (value >= 0 && value < 256) return stack_.push_back(first_number_node + static_cast<Ref>(value));
    const auto halves = std::bit_cast<std::array<std::uint32_t, 2>>(value);
    push_node({PickleKind::integer, 0, halves[0], halves[1]});
  }
  void push_text(PickleKind kind, std::uint64_t length) {
    const std::string_view text = take(length, "a text");
    push_node({kind, static_cast<std::uint32_t>(length), static_cast<std::uint32_t>(text.data() - begin_)});
  }
  void push_long(std::uint64_t length) {
    const std::string_view bytes = take(length, "a number");
    if (length > sizeof(std::int64_t)) {
      push_node({PickleKind::long_integer, static_cast<std::uint32_t>(length),
                 static_cast<std::uint32_t>(bytes.data() - begin_)});
      return;
    }
    std::uint64_t value = !bytes.empty() && (static_cast<unsigned char>(bytes.back()) & 0x80U) != 0 ? UINT64_MAX : 0;
    for (std::size_t i = bytes.size(); i-- > 0;) value = (value << 8U) | static_cast<unsigned char>(bytes[i]);
    push_integer(static_cast<std::int64_t>(value));
  }

  /// Returns the topmost items above the last mark.
  std::span<const Ref> topmost(std::size_t count) {
    if (stack_.size() < count + (marks_.empty() ? 0 : marks_.back())) refuse("the pickle pops from an empty stack");
    return std::span<const Ref>(stack_).last(count);
  }
  Ref top() { return topmost(1)[0]; }
  Ref pop() {
    const Ref ref = top();
    stack_.pop_back();
    return ref;
  }
  /// Returns the items above the last mark, and removes the mark.
  std::span<const Ref> above_mark() {
    if (marks_.empty()) refuse("the pickle pops to a mark, and the stack has no mark");
    const std::span<const Ref> refs = std::span<const Ref>(stack_).subspan(marks_.back());
    marks_.pop_back();
    return refs;
  }
  void drop(std::span<const Ref> refs) { stack_.resize(stack_.size() - refs.size()); }

  void push_container(PickleKind kind, std::span<const Ref> refs) {
    if (kind == PickleKind::tuple && refs.empty()) return stack_.push_back(empty_tuple_node);
    const Node node{kind, static_cast<std::uint32_t>(refs.size()), static_cast<std::uint32_t>(pickle_.items_.size()),
                    static_cast<std::uint32_t>(refs.size())};
    pickle_.items_.insert(pickle_.items_.end(), refs.begin(), refs.end());
    drop(refs);
    push_node(node);
  }

  /// All containers are stored in one array. A container that grows and is not the last one moves to the end, with as
  /// much free capacity again.
  void append(Ref container, std::span<const Ref> refs) {
    Node& node = pickle_.nodes_[container];
    std::vector<Ref>& items = pickle_.items_;
    if (refs.size() > node.c - node.a) {
      if (node.b + node.c == items.size()) {
        node.c = static_cast<std::uint32_t>(node.a + refs.size());
      } else {
        const auto begin = static_cast<std::uint32_t>(items.size());
        const auto room = static_cast<std::uint32_t>(node.a == 0 ? refs.size() : 2 * (node.a + refs.size()));
        items.resize(items.size() + room);
        std::copy_n(items.begin() + node.b, node.a, items.begin() + begin);
        node.b = begin;
        node.c = room;
      }
      items.resize(std::max<std::size_t>(items.size(), std::size_t{node.b} + node.c));
    }
    std::ranges::copy(refs, items.begin() + node.b + node.a);
    node.a += static_cast<std::uint32_t>(refs.size());
  }
  /// `refs` are on top of the stack, above the container.
  void add_to(PickleKind kind, std::span<const Ref> refs) {
    const std::size_t place = stack_.size() - refs.size();
    if (place <= (marks_.empty() ? 0 : marks_.back()))
      refuse("the pickle appends items without a container on the stack");
    const Ref container = stack_[place - 1];
    const PickleKind there = pickle_.kind(container);
    if (there == kind)
      append(container, refs);
    else if (there != PickleKind::object)  // items of an opaque object are ignored
      refuse(fmt::format("the pickle appends items of {} to {}", to_string(kind), to_string(there)));
    drop(refs);
  }

  void push_global(std::string_view module, std::string_view name) {
    if (runs_programs(module, name))
      throw Error(ErrorKind::unsupported, fmt::format("the pickle refers to {}.{}, which can run programs: refused, "
                                                      "and nothing was run. Save the tensors with safetensors",
                                                      printable(module), printable(name)));
    if (name.find('.') != std::string_view::npos)
      refuse(
          fmt::format("the pickle refers to the nested name {} of the module {}, which could evade the check of names",
                      in_quotes(name), in_quotes(module)));
    std::string whole = fmt::format("{}.{}", module, name);
    const auto [place, is_new] = numbers_.try_emplace(whole, static_cast<std::uint32_t>(pickle_.names_.size()));
    if (is_new) pickle_.names_.push_back(std::move(whole));
    push_node({PickleKind::global, place->second});
  }
  static std::string printable(std::string_view text) {
    const std::string quoted = in_quotes(text);
    return quoted.substr(1, quoted.size() - 2);
  }

  void call() {
    const Ref arguments = pop();
    const Ref callee = pop();
    if (!pickle_.is(arguments, PickleKind::tuple)) refuse("the pickle makes a call whose arguments are not a tuple");
    if (pickle_.is(callee, PickleKind::global) && push_known(pickle_.name(callee), pickle_.items(arguments))) return;
    push_node({PickleKind::object, callee, arguments, Pickle::nothing});
  }
  /// Creates a container of the standard library from the arguments of its class. Returns false if it is another
  /// object.
  bool push_known(std::string_view name, std::span<const Ref> arguments) {
    const bool is_default = name == "collections.defaultdict";
    if (is_default && !arguments.empty()) arguments = arguments.subspan(1);  // skips the factory of values
    const bool is_dict = is_default || name == "collections.OrderedDict" || name == "collections.Counter";
    const bool is_set = name == "builtins.set" || name == "__builtin__.set" || name == "builtins.frozenset" ||
                        name == "__builtin__.frozenset";
    if ((!is_dict && !is_set) || arguments.size() > 1) return false;
    std::vector<Ref> items;
    if (!arguments.empty()) {
      const Ref from = arguments[0];
      const std::span<const Ref> given = pickle_.items(from);
      if (is_set || pickle_.is(from, PickleKind::dict)) {
        items.assign(given.begin(), given.end());
      } else if (is_dict) {
        // Python 2 created an ordered dict from a list of pairs.
        for (const Ref pair : given) {
          const std::span<const Ref> both = pickle_.items(pair);
          if (both.size() != 2) return false;
          items.insert(items.end(), both.begin(), both.end());
        }
      }
    }
    // Each call copies. In a pickle that a program wrote, no item is copied twice.
    copied_ += items.size();
    if (copied_ > static_cast<std::size_t>(end_ - begin_)) refuse("the pickle copies a container too often");
    push_container(is_dict ? PickleKind::dict : PickleKind::set, {});
    append(stack_.back(), items);
    return true;
  }
  void build() {
    const Ref state = pop();
    Node& node = pickle_.nodes_[top()];
    if (node.kind == PickleKind::object)
      node.c = state;
    else if (node.kind != PickleKind::dict)
      refuse(fmt::format("the pickle sets a state on {}", to_string(node.kind)));
  }

  void keep(std::uint64_t place) {
    // The limit depends on the number of stored values, not on the length of the memo. Otherwise each gap would allow a
    // larger one.
    if (place > kept_ + memo_slack) refuse("the indices of the pickle's memo have large gaps");
    if (place >= memo_.size()) memo_.resize(place + 1, Pickle::nothing);
    if (memo_[place] == Pickle::nothing) ++kept_;
    memo_[place] = top();
  }
  void fetch(std::uint64_t place) {
    if (place >= memo_.size() || memo_[place] == Pickle::nothing)
      refuse("the pickle reads a memo entry that does not exist");
    stack_.push_back(memo_[place]);
  }

  bool step(unsigned char opcode);
  bool step_rare(unsigned char opcode);
  void check_keys() const;

  const char* begin_;
  const char* at_;
  const char* end_;
  Pickle pickle_;
  std::vector<Ref> stack_;
  std::vector<std::size_t> marks_;
  std::vector<Ref> memo_;
  std::size_t copied_ = 0;                                  // items copied from arguments into containers
  std::uint64_t kept_ = 0;                                  // used places of the memo
  std::unordered_map<std::string, std::uint32_t> numbers_;  // numbers of names
};

bool PickleMachine::step(unsigned char opcode) {
  switch (opcode) {
    case '.':
      return false;
    case '(':
      marks_.push_back(stack_.size());
      return true;
    case 'N':
      stack_.push_back(none_node);
      return true;
    case 0x88:
    case 0x89:
      stack_.push_back(false_node + (opcode == 0x88 ? 1 : 0));
      return true;
    case 'J':
      push_integer(number<std::int32_t>());
      return true;
    case 'K':
      push_integer(number<std::uint8_t>());
      return true;
    case 'M':
      push_integer(number<std::uint16_t>());
      return true;
    case 0x8a:
      push_long(number<std::uint8_t>());
      return true;
    case 'X':
      push_text(PickleKind::text, number<std::uint32_t>());
      return true;
    case 0x8c:
      push_text(PickleKind::text, number<std::uint8_t>());
      return true;
    case '}':
      push_container(PickleKind::dict, {});
      return true;
    case ']':
      push_container(PickleKind::list, {});
      return true;
    case ')':
      stack_.push_back(empty_tuple_node);
      return true;
    case 0x85:
    case 0x86:
    case 0x87: {
      const std::size_t count = opcode - 0x84U;
      push_container(PickleKind::tuple, topmost(count));
      return true;
    }
    case 't':
      push_container(PickleKind::tuple, above_mark());
      return true;
    case 'a':
      add_to(PickleKind::list, topmost(1));
      return true;
    case 'e':
      add_to(PickleKind::list, above_mark());
      return true;
    case 's':
      add_to(PickleKind::dict, topmost(2));
      return true;
    case 'u': {
      const std::span<const Ref> refs = above_mark();
      if (refs.size() % 2 != 0) refuse("the pickle has a key without a value");
      add_to(PickleKind::dict, refs);
      return true;
    }
    case 'q':
      keep(number<std::uint8_t>());
      return true;
    case 'r':
      keep(number<std::uint32_t>());
      return true;
    case 0x94:
      keep(kept_);
      return true;
    case 'h':
      fetch(number<std::uint8_t>());
      return true;
    case 'j':
      fetch(number<std::uint32_t>());
      return true;
    case 'R':
    case 0x81:
      call();
      return true;
    case 'b':
      build();
      return true;
    case 'Q': {
      const Ref id = pop();
      push_node({PickleKind::persistent, 0, id});
      return true;
    }
    case 'c': {
      const std::string_view module = line();
      push_global(module, line());
      return true;
    }
    case 0x93: {
      const Ref name = pop();
      const Ref module = pop();
      if (!pickle_.is(name, PickleKind::text) || !pickle_.is(module, PickleKind::text))
        refuse("the pickle refers to a name that is not text");
      push_global(pickle_.text(module), pickle_.text(name));
      return true;
    }
    default:
      return step_rare(opcode);
  }
}

bool PickleMachine::step_rare(unsigned char opcode) {
  switch (opcode) {
    case 'G': {
      // The only big-endian number.
      std::uint64_t bits = 0;
      for (const char byte : take(sizeof bits, "a number")) bits = (bits << 8U) | static_cast<unsigned char>(byte);
      const auto halves = std::bit_cast<std::array<std::uint32_t, 2>>(bits);
      push_node({PickleKind::real, 0, halves[0], halves[1]});
      return true;
    }
    case 0x95:  // a frame: contains only a length
      number<std::uint64_t>();
      return true;
    case 0x8d:
      push_text(PickleKind::text, number<std::uint64_t>());
      return true;
    case 'C':
      push_text(PickleKind::bytes, number<std::uint8_t>());
      return true;
    case 'U':  // a byte string of Python 2, which wrote names in this form
      push_text(PickleKind::text, number<std::uint8_t>());
      return true;
    case 'T':  // the same, with a longer length field
      push_text(PickleKind::text, number<std::uint32_t>());
      return true;
    case 0x8b:
      push_long(number<std::uint32_t>());
      return true;
    case 'B':
      push_text(PickleKind::bytes, number<std::uint32_t>());
      return true;
    case 0x8e:
    case 0x96:
      push_text(PickleKind::bytes, number<std::uint64_t>());
      return true;
    case 0x8f:
      push_container(PickleKind::set, {});
      return true;
    case 0x90:
      add_to(PickleKind::set, above_mark());
      return true;
    case 0x91:
      push_container(PickleKind::set, above_mark());
      return true;
    case '0':
      pop();
      return true;
    case 0x92:  // an object that is created with named arguments is opaque
      pop();
      call();
      return true;
    default:
      --at_;
      throw Error(ErrorKind::unsupported,
                  fmt::format("the pickle has the opcode 0x{:02x} at byte {}, which no writer "
                              "of tensors needs: refused, and nothing was run. Save the tensors with safetensors",
                              opcode, at_ - begin_));
  }
}

void PickleMachine::check_keys() const {
  std::unordered_set<std::string_view> texts;
  constexpr std::size_t few = 8;
  for (Ref ref = 0; ref < pickle_.nodes_.size(); ++ref) {
    if (!pickle_.is(ref, PickleKind::dict)) continue;
    const std::span<const Ref> pairs = pickle_.items(ref);
    const auto refuse_twice = [&](Ref key) {
      throw Error(ErrorKind::corrupt,
                  fmt::format("the pickle has the duplicate key {} in a dict", in_quotes(pickle_.text(key))));
    };
    const auto is_text = [&](std::size_t i) { return pickle_.is(pairs[i], PickleKind::text); };
    if (pairs.size() <= 2 * few) {
      for (std::size_t i = 2; i < pairs.size(); i += 2)
        for (std::size_t j = 0; j < i; j += 2)
          if (is_text(i) && is_text(j) && pickle_.text(pairs[i]) == pickle_.text(pairs[j])) refuse_twice(pairs[i]);
      continue;
    }
    texts.clear();
    for (std::size_t i = 0; i < pairs.size(); i += 2)
      if (is_text(i) && !texts.insert(pickle_.text(pairs[i])).second) refuse_twice(pairs[i]);
  }
}

Pickle Pickle::parse(std::span<const std::byte> bytes, std::size_t* used) {
  return PickleMachine(bytes).run(used);
}

}  // namespace muster::formats
