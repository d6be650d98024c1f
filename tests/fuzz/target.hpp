// SPDX-License-Identifier: Apache-2.0
#pragma once
// What fuzz targets share.

#include <algorithm>
#include <cstdlib>
#include <initializer_list>

#include "muster/error.hpp"

namespace muster::test {

/// A fuzzer takes an abort for a finding.
inline void require(bool condition) {
  if (!condition) std::abort();
}

/// Calls, and wants an error, if there is one, to be of one of these kinds.
template <class Call>
void may_fail(std::initializer_list<ErrorKind> kinds, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    require(std::ranges::find(kinds, error.kind()) != kinds.end());
  }
}

}  // namespace muster::test
