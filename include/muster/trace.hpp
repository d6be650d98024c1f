// SPDX-License-Identifier: Apache-2.0
#pragma once
// Spans of a program in the trace of its job. With MUSTER_TRACE=DIR each process records its activity in a file in DIR,
// in addition to the spans of library calls. `muster trace DIR` combines the files (docs/tracing.md).

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace muster {

/// Records that this thread executes `name` (first 31 bytes) from construction to destruction. Spans nest in spans that
/// the thread has begun before. Without MUSTER_TRACE only the latest spans of each rank are kept, for `muster trace
/// --last`, at a cost of about 35 ns. A span must end on the thread on which it began. Spans of one thread may end in
/// any order; running spans keep their position in the trace. In a forked child a span records nothing. Local, never
/// throws.
class TraceSpan {
 public:
  /// Begins a span.
  explicit TraceSpan(std::string_view name) noexcept;
  ~TraceSpan();
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  /// Adds to the number of bytes that the span processes, from which its throughput is computed.
  void add_bytes(std::uint64_t bytes) noexcept;

 private:
  alignas(8) std::array<std::byte, 104> span_;
};

/// Returns whether this process writes a trace. Local; the first call may create the file.
bool is_tracing() noexcept;

}  // namespace muster
