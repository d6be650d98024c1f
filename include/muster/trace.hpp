// SPDX-License-Identifier: Apache-2.0
#pragma once
// Spans of a program in the trace of its job: with MUSTER_TRACE=DIR each process writes what it does into a file in
// DIR, beside what the library's calls do by themselves; `muster trace DIR` puts them together (docs/tracing.md).

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace muster {

/// From its construction to its destruction this thread is in `name` (its first 31 bytes), inside of the spans that it
/// has begun before. Without MUSTER_TRACE the last ones of each rank are kept all the same, for `muster trace --last`,
/// and cost some 35 ns. A span must end on the thread on which it began. Spans of one thread may end in any order;
/// spans that are still running keep their place in the trace. In a forked child a span records nothing. Local, never
/// throws.
class TraceSpan {
 public:
  explicit TraceSpan(std::string_view name) noexcept;
  ~TraceSpan();
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  /// Bytes that the span is about: for its throughput.
  void add_bytes(std::uint64_t bytes) noexcept;

 private:
  alignas(8) std::array<std::byte, 104> span_;
};

/// Whether this process writes a trace. Local; the first call may make the file.
bool is_tracing() noexcept;

}  // namespace muster
