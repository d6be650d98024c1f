// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reading what processes have recorded: trace files, rings and files of failures. All of it is taken as bytes from
// outside: what contradicts the format is an error or left out.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/os/process.hpp"
#include "src/trace/record.hpp"

namespace muster::trace {

struct Entry {
  std::uint64_t number = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;  // 0: it has not ended
  std::uint64_t bytes = 0;
  std::uint64_t done = 0;
  std::uint64_t group = 0;
  std::uint64_t operation = 0;
  std::uint32_t parent = 0;
  std::uint32_t thread = 0;
  std::uint32_t page_faults = 0;
  int peer = -1;
  int copies = 0;
  int depth = 0;
  Kind kind = Kind::none;
  bool failed = false;
  std::string name = {};
  std::string detail = {};
};

/// What one process has recorded, in the order in which it has begun.
struct Process {
  os::ProcessIdentity identity = {};
  int rank = -1;
  int size = 0;
  std::string job = {};  // 32 hexadecimal digits
  std::int64_t wall_clock = 0;
  std::vector<Entry> entries = {};
  std::uint64_t damaged = 0;  // records that cannot be
};

/// A trace file, or a ring. `name` is what errors call it. Throws Error(corrupt | version).
Process parse(std::span<const std::byte> bytes, const std::string& name);

/// What ranks of a host were in when one of them found that their group had failed.
struct Failure {
  std::string words = {};       // of the error
  std::uint64_t time = 0;       // as in Record
  std::int64_t wall_clock = 0;  // as in Header
  std::vector<Process> processes = {};
};
/// Throws Error(corrupt | version).
Failure parse_failure(std::span<const std::byte> bytes, const std::string& name);

/// The beginning of a failure's file; behind it are rings.
struct FailureHead {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t rings;
  std::uint64_t time;
  std::int64_t wall_clock;
  std::array<char, 992> words;
};
static_assert(sizeof(FailureHead) == 1024);
inline constexpr std::string_view failure_magic = "MUSTERFL";

}  // namespace muster::trace
