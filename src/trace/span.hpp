// SPDX-License-Identifier: Apache-2.0
#pragma once
// Span: an operation of this thread, recorded as long as it lives: in this process's ring always, and in its trace file
// where MUSTER_TRACE names a directory. Nothing here throws, waits, or changes what the operation does; without a file
// there is no call of the kernel.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "src/trace/record.hpp"

namespace muster::trace {

class Recorder;

/// An operation of a group, as all of its ranks call it.
struct Operation {
  std::uint64_t group = 0;
  std::uint64_t number = 0;
};

/// Counts the operations of a group that all of its ranks are in together.
struct Operations {
  std::uint64_t group = 0;
  std::uint64_t begun = 0;
  Operation next() noexcept { return {group, ++begun}; }
};

class Span {
 public:
  Span(Kind kind, std::string_view name, Operation operation = {}, int peer = -1) noexcept;
  ~Span();
  Span& operator=(Span&&) = delete;
  /// Inside of another operation of the library there is none: for what programs and operations call alike.
  struct Outermost {};
  Span(Outermost, Kind kind, std::string_view name, Operations& operations) noexcept;
  Span(Outermost, Kind kind, std::string_view name, Operation operation, int peer) noexcept;

  void add_bytes(std::uint64_t bytes) noexcept { bytes_ += bytes; }
  /// Its route. The text is not copied.
  void set_route(std::string_view route) noexcept { route_ = route; }
  /// So many bytes have moved so far.
  void has_moved(std::uint64_t bytes) noexcept;

 private:
  friend class Parts;
  void begin(Kind kind, std::string_view name, Operation operation, int peer) noexcept;
  static bool is_outermost() noexcept;
  /// And this is the process that it began in.
  [[nodiscard]] bool is_recorded() const noexcept;
  /// Its record in the ring; null if that is another one's by now.
  [[nodiscard]] Record* in_ring() const noexcept;

  Recorder* recorder_ = nullptr;  // none: nothing is recorded
  Span* outer_ = nullptr;         // of this thread
  std::uint64_t number_ = 0;      // in the ring, and its place there
  std::uint64_t place_ = 0;
  Record* in_file_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::string_view route_ = "";
  std::uint32_t file_number_ = 0;
  int exceptions_ = 0;
  std::uint8_t depth_ = 0;
  bool is_library_ = false;  // an operation of the library, or in one
};

/// The parts of an operation, one after the other: recorded when it goes, before its span.
class Parts {
 public:
  Parts(const Span& span, std::uint64_t begin) noexcept;
  ~Parts();
  Parts& operator=(Parts&&) = delete;
  /// One ends here, and the next one begins.
  void end(std::string_view name, std::uint64_t now, std::uint64_t bytes, std::uint64_t copies,
           std::uint64_t page_faults) noexcept;

 private:
  const Span& span_;
  std::uint64_t last_;
  PartsRecord record_;  // made where there is a file
};

/// This process's rank in its job: that of the largest group that it is in.
void join(std::span<const std::byte, 16> job, int rank, int size) noexcept;

/// From now on the ring is in that memory, of ring_bytes, which other processes see and which stays as long as this
/// one.
void keep_ring_in(std::byte* memory) noexcept;

}  // namespace muster::trace
