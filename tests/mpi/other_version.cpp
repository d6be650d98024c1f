// SPDX-License-Identifier: Apache-2.0
// Loaded before libmuster (LD_PRELOAD): makes a rank appear to have another version of Muster.
#include "muster/version.hpp"

namespace muster {

std::string_view version() noexcept {
  return "0.0.9";
}

}  // namespace muster
