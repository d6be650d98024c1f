// SPDX-License-Identifier: Apache-2.0
#pragma once
// FunctionRef: a non-owning reference to a callable object, which must outlive it. Unlike std::function, it allocates
// no memory.

#include <concepts>
#include <type_traits>
#include <utility>

namespace muster {

template <class Signature>
class FunctionRef;

template <class Result, class... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <class Call>
  requires(!std::same_as<std::remove_cvref_t<Call>, FunctionRef> && std::is_invocable_r_v<Result, Call&, Arguments...>)
      FunctionRef(const Call& call)
  noexcept
      : object_(&call), call_([](const void* object, Arguments... arguments) -> Result {
          return (*static_cast<const Call*>(object))(std::forward<Arguments>(arguments)...);
        }) {}
  Result operator()(Arguments... arguments) const { return call_(object_, std::forward<Arguments>(arguments)...); }

 private:
  const void* object_;
  Result (*call_)(const void*, Arguments...);
};

}  // namespace muster
