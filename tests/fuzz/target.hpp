// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared functions of the fuzz targets.

#include <algorithm>
#include <cstdlib>
#include <initializer_list>

#include "muster/error.hpp"

namespace muster::test {

/// A fuzzer reports an abort as a finding.
inline void require(bool condition) {
  if (!condition) std::abort();
}

/// Makes a call. If it throws, the error must be of one of these kinds.
template <class Call>
void may_fail(std::initializer_list<ErrorKind> kinds, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    require(std::ranges::find(kinds, error.kind()) != kinds.end());
  }
}

}  // namespace muster::test
