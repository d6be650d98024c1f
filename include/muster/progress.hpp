// SPDX-License-Identifier: Apache-2.0
#pragma once
// How far long work has come.

#include <cstdint>
#include <functional>

namespace muster {

struct Progress {
  std::uint64_t bytes = 0;
  std::uint64_t total_bytes = 0;
  double seconds = 0;  ///< since it began
};

/// Called some times a second, on the caller's thread or one of the work's own, one call at a time; of collective work
/// on rank 0.
using ProgressCallback = std::function<void(const Progress&)>;

}  // namespace muster
