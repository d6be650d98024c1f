// SPDX-License-Identifier: Apache-2.0
#pragma once
// Compares the type of our declaration of a function with that of the real header.

#include <type_traits>

namespace muster::test {

/// Returns whether both types are passed alike in a call: both pointers, or numbers of equal size, or structures of
/// equal size.
template <class Ours, class Theirs>
constexpr bool is_passed_alike() {
  if constexpr (std::is_same_v<Ours, Theirs>)
    return true;
  else if constexpr (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>)
    return std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  else
    return sizeof(Ours) == sizeof(Theirs) && std::is_class_v<Ours> == std::is_class_v<Theirs> &&
           std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;
}

template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class R, class... A, class S, class... B>
struct Alike<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B))
      return false;
    else
      return is_passed_alike<R, S>() && (is_passed_alike<A, B>() && ...);
  }();
};

}  // namespace muster::test
