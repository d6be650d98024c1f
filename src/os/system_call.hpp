// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a call of the kernel is made where a test may let it fail (fault.hpp).

#include <cerrno>
#include <string_view>

#include "src/os/fault.hpp"

namespace muster::os {

/// True where the seam lets this call fail; errno is set then.
inline bool is_faulty(std::string_view name, std::string_view path) noexcept {
  const int error = fault(name, path);
  if (error <= 0) return false;
  errno = error;
  return true;
}

/// Calls until it is not interrupted. Negative: errno says why.
template <class Call>
auto try_call(std::string_view name, std::string_view path, const Call& call) -> decltype(call()) {
  for (;;) {
    if (is_faulty(name, path)) return -1;
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

}  // namespace muster::os
