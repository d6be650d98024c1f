// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pickles of others, read without running them: what an object would be made with is kept as a node, and nothing is
// ever imported or called. Who reads the nodes decides which names mean something to it; all others are opaque.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace muster::formats {

enum class PickleKind : std::uint8_t {
  none,
  boolean,
  integer,
  long_integer,  ///< beyond 64 bits: its bytes, little endian
  real,
  text,
  bytes,
  tuple,
  list,
  dict,  ///< collections.OrderedDict, too, whose attributes are left out
  set,
  global,      ///< "module.name"
  object,      ///< what a global would make of its arguments
  persistent,  ///< a reference to something outside: its arguments
};
std::string_view to_string(PickleKind kind) noexcept;

/// What a pickle says, as long as its bytes. Immutable. Nodes may refer to each other in circles: who walks them limits
/// the depth.
class Pickle {
 public:
  using Ref = std::uint32_t;

  /// Reads one pickle of protocol 2 to 5 from the beginning of `bytes`; `used` gets its length, or everything has to be
  /// used if it is null. Throws Error(corrupt) that says what is wrong at which byte, Error(unsupported) on opcodes
  /// that no writer of tensors needs, and on names that run programs. Memory is at most some 30 bytes for each of
  /// `bytes`.
  static Pickle parse(std::span<const std::byte> bytes, std::size_t* used = nullptr);

  [[nodiscard]] Ref root() const noexcept { return root_; }
  /// All nodes are numbered below it.
  [[nodiscard]] Ref size() const noexcept { return static_cast<Ref>(nodes_.size()); }
  [[nodiscard]] PickleKind kind(Ref ref) const noexcept { return nodes_[ref].kind; }
  [[nodiscard]] bool is(Ref ref, PickleKind kind) const noexcept { return nodes_[ref].kind == kind; }
  /// Of an integer or a boolean; none else.
  [[nodiscard]] std::optional<std::int64_t> integer(Ref ref) const noexcept;
  /// Of an integer that is not negative.
  [[nodiscard]] std::optional<std::uint64_t> count(Ref ref) const noexcept;
  /// Of a text, of bytes or of a long integer; empty else.
  [[nodiscard]] std::string_view text(Ref ref) const noexcept;
  /// Of a tuple, a list or a set; keys and values in turns of a dict; empty else.
  [[nodiscard]] std::span<const Ref> items(Ref ref) const noexcept;
  /// The name of a global, or of the global that an object is made by; empty else.
  [[nodiscard]] std::string_view name(Ref ref) const noexcept;
  /// Of an object or a persistent reference, if they are a tuple; empty else.
  [[nodiscard]] std::span<const Ref> arguments(Ref ref) const noexcept;
  /// What an object gets after it is made.
  [[nodiscard]] std::optional<Ref> state(Ref ref) const noexcept;
  /// The value of a key that is text: in a dict, in a state, or in that of an object.
  [[nodiscard]] std::optional<Ref> find(Ref ref, std::string_view key) const noexcept;
  /// Likewise, of one that has to be there. Throws Error(corrupt).
  [[nodiscard]] Ref member(Ref ref, std::string_view key) const;

 private:
  friend class PickleMachine;
  /// integer, real: `b` and `c` are its bits. text, bytes: `b` is where, `a` how long. Containers: `b` is the first
  /// item, `a` how many, `c` room for. global: `a` is the number of its name. object: `a` its global, `b` its
  /// arguments, `c` its state. persistent: `b` its arguments.
  struct Node {
    PickleKind kind = PickleKind::none;
    std::uint32_t a = 0;
    std::uint32_t b = 0;
    std::uint32_t c = 0;
  };
  static constexpr Ref nothing = UINT32_MAX;

  const char* bytes_ = nullptr;
  std::vector<Node> nodes_;
  std::vector<Ref> items_;
  std::vector<std::string> names_;
  Ref root_ = 0;
};

}  // namespace muster::formats
