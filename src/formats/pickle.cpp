// SPDX-License-Identifier: Apache-2.0
#include "src/formats/pickle.hpp"

#include <array>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"

namespace muster::formats {

std::string_view to_string(PickleKind kind) noexcept {
  constexpr std::array<std::string_view, 14> names = {"None",  "a boolean", "a number",         "a number", "a number",
                                                      "text",  "bytes",     "a tuple",          "a list",   "a dict",
                                                      "a set", "a class",   "an opaque object", "a storage"};
  return names[static_cast<std::size_t>(kind)];
}

std::optional<std::int64_t> Pickle::integer(Ref ref) const noexcept {
  const Node& node = nodes_[ref];
  if (node.kind != PickleKind::integer && node.kind != PickleKind::boolean) return std::nullopt;
  return std::bit_cast<std::int64_t>(std::array{node.b, node.c});
}

std::optional<std::uint64_t> Pickle::count(Ref ref) const noexcept {
  const std::optional<std::int64_t> value = integer(ref);
  if (!value || *value < 0) return std::nullopt;
  return static_cast<std::uint64_t>(*value);
}

std::string_view Pickle::text(Ref ref) const noexcept {
  const Node& node = nodes_[ref];
  if (node.kind != PickleKind::text && node.kind != PickleKind::bytes && node.kind != PickleKind::long_integer)
    return {};
  return {bytes_ + node.b, node.a};
}

std::span<const Pickle::Ref> Pickle::items(Ref ref) const noexcept {
  const Node& node = nodes_[ref];
  if (node.kind < PickleKind::tuple || node.kind > PickleKind::set) return {};
  return std::span(items_).subspan(node.b, node.a);
}

std::string_view Pickle::name(Ref ref) const noexcept {
  const Node* node = &nodes_[ref];
  if (node->kind == PickleKind::object) node = &nodes_[node->a];
  return node->kind == PickleKind::global ? std::string_view(names_[node->a]) : std::string_view();
}

std::span<const Pickle::Ref> Pickle::arguments(Ref ref) const noexcept {
  const Node& node = nodes_[ref];
  if (node.kind != PickleKind::object && node.kind != PickleKind::persistent) return {};
  return is(node.b, PickleKind::tuple) ? items(node.b) : std::span<const Ref>();
}

std::optional<Pickle::Ref> Pickle::state(Ref ref) const noexcept {
  const Node& node = nodes_[ref];
  if (node.kind != PickleKind::object || node.c == nothing) return std::nullopt;
  return node.c;
}

std::optional<Pickle::Ref> Pickle::find(Ref ref, std::string_view key) const noexcept {
  if (is(ref, PickleKind::object)) {
    if (nodes_[ref].c == nothing) return std::nullopt;
    ref = nodes_[ref].c;
  }
  // The state of an object with slots is a tuple of two dicts, or of None and a dict.
  if (is(ref, PickleKind::tuple) && items(ref).size() == 2)
    ref = is(items(ref)[1], PickleKind::dict) ? items(ref)[1] : items(ref)[0];
  if (!is(ref, PickleKind::dict)) return std::nullopt;
  const std::span<const Ref> pairs = items(ref);
  for (std::size_t i = 0; i + 1 < pairs.size(); i += 2)
    if (is(pairs[i], PickleKind::text) && text(pairs[i]) == key) return pairs[i + 1];
  return std::nullopt;
}

Pickle::Ref Pickle::member(Ref ref, std::string_view key) const {
  const std::optional<Ref> found = find(ref, key);
  if (!found) throw Error(ErrorKind::corrupt, "key " + in_quotes(key) + " does not exist");
  return *found;
}

}  // namespace muster::formats
