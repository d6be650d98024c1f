// SPDX-License-Identifier: Apache-2.0
#include "muster/version.hpp"

#define MUSTER_TEXT(x) #x
#define MUSTER_EXPAND(x) MUSTER_TEXT(x)

namespace muster {

std::string_view version() noexcept {
  return MUSTER_EXPAND(MUSTER_VERSION_MAJOR) "." MUSTER_EXPAND(MUSTER_VERSION_MINOR) "." MUSTER_EXPAND(
      MUSTER_VERSION_PATCH);
}

}  // namespace muster
