// SPDX-License-Identifier: Apache-2.0
#pragma once
// Span: an operation of this thread. It is recorded during its lifetime: always in this process's ring, and in its
// trace file if MUSTER_TRACE names a directory. These functions do not throw, wait, or affect the operation. Without a
// trace file they make no system call.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "src/trace/rings.hpp"

namespace muster::trace {

class Recorder;

/// Identifies an operation of a group. All ranks of the group use the same number.
struct OperationId {
  std::uint64_t group = 0;
  std::uint64_t number = 0;
};

/// Counts the operations that all ranks of a group perform together.
struct Operations {
  std::uint64_t group = 0;
  std::uint64_t begun = 0;
  OperationId next() noexcept { return {group, ++begun}; }
};

class Span {
 public:
  Span(SpanKind kind, std::string_view name, OperationId operation = {}, int peer = -1) noexcept;
  ~Span();
  Span& operator=(Span&&) = delete;
  /// Records nothing inside another operation of the library. For functions that both programs and operations call.
  struct Outermost {};
  Span(Outermost, SpanKind kind, std::string_view name, Operations& operations) noexcept;
  Span(Outermost, SpanKind kind, std::string_view name, OperationId operation, int peer) noexcept;

  void add_bytes(std::uint64_t bytes) noexcept { bytes_ += bytes; }
  /// Sets the route. The text is not copied.
  void set_route(std::string_view route) noexcept { route_ = route; }
  /// Sets the number of bytes that have moved so far.
  void has_moved(std::uint64_t bytes) noexcept;

 private:
  friend class OperationParts;
  void begin(SpanKind kind, std::string_view name, OperationId operation, int peer) noexcept;
  static bool is_outermost() noexcept;
  /// Returns whether it is recorded and this process is the one in which it began.
  [[nodiscard]] bool is_recorded() const noexcept;
  /// Returns its record in the ring; null if the place has been reused.
  [[nodiscard]] TraceRecord* in_ring() const noexcept;

  Recorder* recorder_ = nullptr;  // null: nothing is recorded
  Span* outer_ = nullptr;         // the enclosing span of this thread
  std::uint64_t number_ = 0;      // number in the ring; place_ is its position
  std::uint64_t place_ = 0;
  TraceRecord* in_file_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::string_view route_ = "";
  std::uint32_t file_number_ = 0;
  int exceptions_ = 0;
  std::uint8_t depth_ = 0;
  bool is_library_ = false;  // an operation of the library, or inside one
};

/// The consecutive parts of an operation. The destructor records them, before the span of the operation.
class OperationParts {
 public:
  OperationParts(const Span& span, std::uint64_t begin) noexcept;
  ~OperationParts();
  OperationParts& operator=(OperationParts&&) = delete;
  /// Ends one part and begins the next one.
  void end(std::string_view name, std::uint64_t now, std::uint64_t bytes, std::uint64_t copies,
           std::uint64_t page_faults) noexcept;

 private:
  const Span& span_;
  std::uint64_t last_;
  PartsRecord record_;  // used only if there is a file
};

/// Sets this process's rank in its job, which is its rank in the largest group that it is in.
void join(std::span<const std::byte, 16> job, int rank, int size) noexcept;

/// Moves the ring into `memory` of ring_bytes bytes. Other processes can read it there. The memory must exist until
/// this process ends.
void keep_ring_in(std::byte* memory) noexcept;

}  // namespace muster::trace
