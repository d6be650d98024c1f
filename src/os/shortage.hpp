// SPDX-License-Identifier: Apache-2.0
#pragma once
// Errors of a call about another process that are not that process's failure.

#include <cerrno>

namespace muster::os {

/// True for descriptors, memory, buffers and ports that this process or its host has run out of.
constexpr bool is_own_shortage(int err) noexcept {
  return err == EMFILE || err == ENFILE || err == ENOBUFS || err == ENOMEM || err == EADDRNOTAVAIL;
}

}  // namespace muster::os
