// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is recorded of an operation, the same in a rank's ring of shared memory and in a trace file (docs/tracing.md):
// a header, and behind it records of one size. A record is numbered when its operation begins and gets its end when
// that ends: of a process that has died, the operations without an end are those that it was in.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace muster::trace {

inline constexpr std::string_view magic = "MUSTERTR";
inline constexpr std::uint32_t version = 1;
/// The end of the name of a trace file.
inline constexpr const char* file_suffix = ".mtrace";

enum class Kind : std::uint8_t {
  none,
  exchange,
  stream,
  collective,
  message,
  file,
  export_model,
  program,  ///< the program's own (muster/trace.hpp)
  phase,    ///< a part of one of the others
  parts,    ///< of records alone: several of those (PartsRecord)
};
inline constexpr std::array<std::string_view, 9> kind_names = {"none", "exchange", "stream",  "collective", "message",
                                                               "file", "export",   "program", "phase"};
constexpr std::string_view to_string(Kind kind) noexcept {
  return kind_names[static_cast<std::size_t>(kind)];
}

/// Times are nanoseconds of CLOCK_MONOTONIC. Text ends with a zero, or at the end of its array.
struct Record {
  std::uint64_t number;     // of this record in its ring or file, from 1 on; 0: there is none. Written last
  std::uint64_t begin;      // in rings, where nothing is traced, as of the kernel's last tick
  std::uint64_t end;        // 0: it has not ended. Written last of what is known then
  std::uint64_t bytes;      // that this rank gives to the operation, or reads or writes
  std::uint64_t done;       // of a stream: how many of them have moved
  std::uint64_t group;      // the first bytes of its nonce; 0: none
  std::uint64_t operation;  // its number in that group, the same on all ranks; 0: none
  std::uint32_t parent;     // the number of the record that this one is a part of; 0: none
  std::uint32_t thread;
  std::uint32_t page_faults;
  std::int32_t peer;  // the rank that a message goes to or comes from; -1: none
  std::uint8_t copies;
  std::uint8_t depth;  // how many of the thread's spans it lies in
  Kind kind;
  std::uint8_t failed;  // 1: it has ended by an exception
  std::array<char, 32> name;
  std::array<char, 20>
      detail;  // before it ends the last part of it that has ended; after that its route, if it has one
};
static_assert(sizeof(Record) == 128);

/// In place of a Record, of trace files: the parts of an operation that follow each other, written when the last of
/// them has ended.
struct PartsRecord {
  static constexpr std::size_t most = 5;
  std::uint64_t number;
  std::uint64_t begin;
  std::uint64_t bytes;  // that moved in one of them
  std::array<std::array<char, 8>, most> names;
  std::uint32_t page_faults;  // in that one
  std::uint32_t parent;
  std::uint8_t copies;  // in that one
  std::uint8_t depth;
  Kind kind;
  std::uint8_t moving;  // which one that is
  std::uint32_t thread;
  std::array<std::uint64_t, most> nanoseconds;  // that each took
  std::uint32_t count;
  std::uint32_t unused;
};
static_assert(sizeof(PartsRecord) == sizeof(Record) && offsetof(PartsRecord, kind) == offsetof(Record, kind));

struct Header {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t record_bytes;
  std::uint64_t capacity;   // of a ring, in records; 0: a file
  std::uint64_t claimed;    // of a ring: how many records it has had
  std::int64_t wall_clock;  // what to add to a time for nanoseconds since 1970
  std::int32_t rank;        // in the job; -1: not known yet
  std::int32_t size;
  std::array<std::byte, 16> job;   // the nonce of the largest group
  std::array<char, 192> identity;  // the process (os::identity_text)
};
static_assert(sizeof(Header) == 256);

inline constexpr std::uint64_t ring_records = 126;
/// Header and records: 16 KiB.
inline constexpr std::uint64_t ring_bytes = sizeof(Header) + ring_records * sizeof(Record);

}  // namespace muster::trace
