// SPDX-License-Identifier: Apache-2.0
// Loaded before libmuster (LD_PRELOAD): a rank with it is one of another version of Muster.
#include "muster/version.hpp"

namespace muster {

std::string_view version() noexcept {
  return "0.0.9";
}

}  // namespace muster
