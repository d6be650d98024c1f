// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads third-party pickles without executing them: a call that would create an object is stored as a node, and nothing
// is imported or called. The reader of the nodes decides which names have a meaning; all other names are opaque.

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
  long_integer,  ///< more than 64 bits: its bytes, little endian
  real,
  text,
  bytes,
  tuple,
  list,
  dict,  ///< also collections.OrderedDict, without its attributes
  set,
  global,      ///< "module.name"
  object,      ///< the call of a global with arguments
  persistent,  ///< a reference to an external object: its arguments
};
std::string_view to_string(PickleKind kind) noexcept;

/// The contents of a pickle, valid while its bytes exist. Immutable. Nodes may refer to each other in cycles, so code
/// that walks them must limit the depth.
class Pickle {
 public:
  using Ref = std::uint32_t;

  /// Reads one pickle of protocol 2 to 5 from the beginning of `bytes`. `used` receives its length; if it is null, the
  /// pickle must use all bytes. Throws Error(corrupt) with the problem and its byte, and Error(unsupported) on opcodes
  /// that no writer of tensors needs and on names that run programs. Uses at most about 30 bytes of memory per byte of
  /// `bytes`.
  static Pickle parse(std::span<const std::byte> bytes, std::size_t* used = nullptr);

  [[nodiscard]] Ref root() const noexcept { return root_; }
  /// Returns the number of nodes; all references are below it.
  [[nodiscard]] Ref size() const noexcept { return static_cast<Ref>(nodes_.size()); }
  [[nodiscard]] PickleKind kind(Ref ref) const noexcept { return nodes_[ref].kind; }
  [[nodiscard]] bool is(Ref ref, PickleKind kind) const noexcept { return nodes_[ref].kind == kind; }
  /// Returns the value of an integer or a boolean; nullopt for other nodes.
  [[nodiscard]] std::optional<std::int64_t> integer(Ref ref) const noexcept;
  /// Returns the value of an integer that is not negative; nullopt for other nodes.
  [[nodiscard]] std::optional<std::uint64_t> count(Ref ref) const noexcept;
  /// Returns the bytes of a text, of bytes or of a long integer; empty for other nodes.
  [[nodiscard]] std::string_view text(Ref ref) const noexcept;
  /// Returns the items of a tuple, a list or a set, and alternating keys and values of a dict; empty for other nodes.
  [[nodiscard]] std::span<const Ref> items(Ref ref) const noexcept;
  /// Returns the name of a global, or of the global that creates an object; empty for other nodes.
  [[nodiscard]] std::string_view name(Ref ref) const noexcept;
  /// Returns the arguments of an object or a persistent reference if they are a tuple; empty for other nodes.
  [[nodiscard]] std::span<const Ref> arguments(Ref ref) const noexcept;
  /// Returns the state that an object receives after its creation.
  [[nodiscard]] std::optional<Ref> state(Ref ref) const noexcept;
  /// Returns the value of a text key in a dict, in a state, or in the state of an object.
  [[nodiscard]] std::optional<Ref> find(Ref ref, std::string_view key) const noexcept;
  /// The same for a key that must exist. Throws Error(corrupt).
  [[nodiscard]] Ref member(Ref ref, std::string_view key) const;

 private:
  friend class PickleMachine;
  /// integer, real: `b` and `c` are its bits. text, bytes: `b` is the position and `a` the length. Containers: `b` is
  /// the first item, `a` the number of items, `c` the capacity. global: `a` is the number of its name. object: `a` is
  /// its global, `b` its arguments, `c` its state. persistent: `b` is its arguments.
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
