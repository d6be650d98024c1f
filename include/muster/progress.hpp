// SPDX-License-Identifier: Apache-2.0
#pragma once
// Progress reports of long operations.

#include <cstdint>
#include <functional>

namespace muster {

/// The progress of an operation: bytes processed so far, and their total.
struct Progress {
  /// Bytes processed so far.
  std::uint64_t bytes = 0;
  /// Bytes that the operation processes in total.
  std::uint64_t total_bytes = 0;
  double seconds = 0;  ///< since the operation began
};

/// Receives progress reports a few times per second. It is called on the thread of the caller or on an internal thread,
/// never concurrently. In collective operations only rank 0 calls it.
using ProgressCallback = std::function<void(const Progress&)>;

}  // namespace muster
