// SPDX-License-Identifier: Apache-2.0
#pragma once
// The rings of running processes, and of dead processes whose shared memory a running process has open. Also the files
// that keep them when a group fails.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace muster::trace {

using Ring = std::vector<std::byte>;

/// Returns the rings that a process of this host has open: its own, and those of the ranks with which it shares memory.
/// Empty if this user may not read them.
std::vector<Ring> rings_of(const std::string& pid) noexcept;
/// Returns the rings of all accessible processes of this host, each ring once.
std::vector<Ring> all_rings();

/// The operations of this job's ranks on this host when a group fails. Never throws.
class RanksAtFailure {
 public:
  /// Reads the rings if this process is the first to detect the failure.
  explicit RanksAtFailure(bool is_first) noexcept;
  /// Writes them to a file in failure_directory(), and to another one in the directory of MUSTER_TRACE. Exception:
  /// another rank of the host has done so within the last few seconds. `words`: the error message.
  void keep(std::string_view words) const noexcept;

 private:
  void keep_in(const std::string& directory, std::span<const std::byte> bytes) const;

  std::string job_;
  std::vector<Ring> rings_;
};

/// The suffix of the name of a failure file.
inline constexpr const char* failure_suffix = ".mfail";
/// Returns the directory of failure files: a private directory of this user below the temporary directory.
std::string failure_directory();
/// Returns the failure files in a directory, newest first. Empty if the directory does not exist.
std::vector<std::string> failures_in(const std::string& directory);

// The record of an operation. A rank's ring in shared memory and its trace file have the same format
// (docs/reference/trace-file.md): a header, followed by records of one size. A record gets its number when its
// operation begins, and its end time when the operation ends. In the records of a dead process, operations without an
// end were running when it died.

inline constexpr std::string_view magic = "MUSTERTR";
inline constexpr std::uint32_t version = 1;
/// The suffix of the name of a trace file.
inline constexpr const char* file_suffix = ".mtrace";

enum class SpanKind : std::uint8_t {
  none,
  exchange,
  stream,
  collective,
  message,
  file,
  export_model,
  program,  ///< an operation of the program (muster/trace.hpp)
  phase,    ///< a part of another operation
  parts,    ///< only in records: several consecutive phases (PartsRecord)
};
inline constexpr std::array<std::string_view, 9> kind_names = {"none", "exchange", "stream",  "collective", "message",
                                                               "file", "export",   "program", "phase"};
constexpr std::string_view to_string(SpanKind kind) noexcept {
  return kind_names[static_cast<std::size_t>(kind)];
}

/// Times are nanoseconds of CLOCK_MONOTONIC. Text ends with a zero, or at the end of its array.
struct TraceRecord {
  std::uint64_t number;     // number in its ring or file, from 1 on; 0: no record. Written last
  std::uint64_t begin;      // in rings without a trace file: time of the kernel's last tick
  std::uint64_t end;        // 0: it has not ended. Written after the other fields of the end
  std::uint64_t bytes;      // bytes that this rank contributes, reads or writes
  std::uint64_t done;       // for a stream: bytes that have moved so far
  std::uint64_t group;      // the first bytes of the group's nonce; 0: no group
  std::uint64_t operation;  // number of the operation in the group, equal on all ranks; 0: none
  std::uint32_t parent;     // number of the record that contains this one; 0: none
  std::uint32_t thread;
  std::uint32_t page_faults;
  std::int32_t peer;  // destination or source rank of a message; -1: none
  std::uint8_t copies;
  std::uint8_t depth;  // number of the thread's spans that contain it
  SpanKind kind;
  std::uint8_t failed;  // 1: it has ended by an exception
  std::array<char, 32> name;
  std::array<char, 20> detail;  // the last completed part; after the end the route, if any
};
static_assert(sizeof(TraceRecord) == 128);

/// A record of trace files for the consecutive parts of an operation. It is written when the last part has ended, and
/// has the size of a Record.
struct PartsRecord {
  static constexpr std::size_t most = 5;
  std::uint64_t number;
  std::uint64_t begin;
  std::uint64_t bytes;  // bytes that the moving part has moved
  std::array<std::array<char, 8>, most> names;
  std::uint32_t page_faults;  // page faults of the moving part
  std::uint32_t parent;
  std::uint8_t copies;  // copies in the moving part
  std::uint8_t depth;
  SpanKind kind;
  std::uint8_t moving;  // index of the moving part
  std::uint32_t thread;
  std::array<std::uint64_t, most> nanoseconds;  // duration of each part
  std::uint32_t count;
  std::uint32_t unused;
};
static_assert(sizeof(PartsRecord) == sizeof(TraceRecord) && offsetof(PartsRecord, kind) == offsetof(TraceRecord, kind));

struct TraceHeader {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t record_bytes;
  std::uint64_t capacity;   // size of a ring in records; 0: a file
  std::uint64_t claimed;    // for a ring: number of records written so far
  std::int64_t wall_clock;  // added to a time, it gives nanoseconds since 1970
  std::int32_t rank;        // in the job; -1: not known yet
  std::int32_t size;
  std::array<std::byte, 16> job;   // the nonce of the largest group
  std::array<char, 192> identity;  // the process (os::identity_text)
};
static_assert(sizeof(TraceHeader) == 256);

inline constexpr std::uint64_t ring_records = 126;
/// Header and records: 16 KiB.
inline constexpr std::uint64_t ring_bytes = sizeof(TraceHeader) + ring_records * sizeof(TraceRecord);

}  // namespace muster::trace
