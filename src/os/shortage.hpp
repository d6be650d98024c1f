// SPDX-License-Identifier: Apache-2.0
#pragma once
// Distinguishes a shortage of this process from a failure of the other process, after a call that concerns both.

#include <cerrno>

namespace muster::os {

/// Returns true if this process or its host has run out of descriptors, memory, buffers or ports.
constexpr bool is_own_shortage(int err) noexcept {
  return err == EMFILE || err == ENFILE || err == ENOBUFS || err == ENOMEM || err == EADDRNOTAVAIL;
}

}  // namespace muster::os
