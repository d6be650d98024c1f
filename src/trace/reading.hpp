// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads records of processes: trace files, rings and failure files. All input is untrusted: data that contradicts the
// format causes an error or is skipped.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/os/process.hpp"
#include "src/trace/rings.hpp"

namespace muster::trace {

struct TraceEntry {
  std::uint64_t number = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;  // 0: the operation has not ended
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
  SpanKind kind = SpanKind::none;
  bool failed = false;
  std::string name = {};
  std::string detail = {};
};

/// The records of one process, in the order in which the operations began.
struct Process {
  os::ProcessIdentity identity = {};
  int rank = -1;
  int size = 0;
  std::string job = {};  // 32 hexadecimal digits
  std::int64_t wall_clock = 0;
  std::vector<TraceEntry> entries = {};
  std::uint64_t damaged = 0;  // number of invalid records
};

/// Parses a trace file or a ring. Errors use `name` as its name. Throws Error(corrupt | version).
Process parse(std::span<const std::byte> bytes, const std::string& name);

/// The operations of the ranks of a host at the moment when one of them detected that their group had failed.
struct Failure {
  std::string words = {};       // the error message
  std::uint64_t time = 0;       // as in Record
  std::int64_t wall_clock = 0;  // as in Header
  std::vector<Process> processes = {};
};
/// Parses a failure file. Throws Error(corrupt | version).
Failure parse_failure(std::span<const std::byte> bytes, const std::string& name);

/// The beginning of a failure file; rings follow.
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
