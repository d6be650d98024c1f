// SPDX-License-Identifier: Apache-2.0
#include "src/trace/reading.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fixed_string.hpp"

namespace muster::trace {
namespace {

[[noreturn]] void refuse(ErrorKind kind, const std::string& name, const std::string& words) {
  throw Error(kind, fmt::format("{}: reading: {}", in_quotes(name), words), {.path = name});
}

void check_magic(std::span<const char> magic, std::string_view wanted, std::uint32_t its_version,
                 const std::string& name) {
  if (std::string_view(magic.data(), magic.size()) != wanted) refuse(ErrorKind::corrupt, name, "not a trace of Muster");
  if (its_version != version)
    refuse(ErrorKind::version, name,
           fmt::format("the trace has format version {}, this Muster reads {}. Use the Muster version that wrote it",
                       its_version, version));
}

/// In nanoseconds, longer than any machine runs. Sums of a few such times fit into 64 bits.
constexpr std::uint64_t longest_time = std::uint64_t{1} << 60;

/// Returns whether a process can have written this record at position `at` of a file, or of a ring of `capacity`
/// records.
bool can_be(const TraceRecord& record, std::uint64_t at, std::uint64_t capacity) {
  const bool is_in_place = capacity == 0 ? record.number == at + 1 : (record.number - 1) % capacity == at;
  return is_in_place && record.kind > SpanKind::none && record.kind <= SpanKind::phase && record.failed <= 1 &&
         record.begin < longest_time && record.end < longest_time && (record.end == 0 || record.end >= record.begin) &&
         (capacity != 0 || record.parent < record.number);
}

TraceEntry entry_of(const TraceRecord& record) {
  return {.number = record.number,
          .begin = record.begin,
          .end = record.end,
          .bytes = record.bytes,
          .done = record.done,
          .group = record.group,
          .operation = record.operation,
          .parent = record.parent,
          .thread = record.thread,
          .page_faults = record.page_faults,
          .peer = record.peer,
          .copies = record.copies,
          .depth = record.depth,
          .kind = record.kind,
          .failed = record.failed != 0,
          .name = get_text(record.name),
          .detail = get_text(record.detail)};
}

/// Adds the parts; returns false if they are invalid.
bool add_parts(const TraceRecord& record, std::uint64_t at, std::vector<TraceEntry>& entries) {
  PartsRecord parts{};
  std::memcpy(&parts, &record, sizeof parts);
  if (parts.number != at + 1 || parts.count > PartsRecord::most || parts.parent >= parts.number) return false;
  const std::size_t before = entries.size();
  std::uint64_t begin = parts.begin;
  for (std::size_t i = 0; i < parts.count; ++i) {
    if (begin >= longest_time || parts.nanoseconds[i] >= longest_time - begin) {
      entries.resize(before);
      return false;
    }
    const bool moves = parts.moving == i;
    entries.push_back({.number = parts.number,
                       .begin = begin,
                       .end = begin + parts.nanoseconds[i],
                       .bytes = moves ? parts.bytes : 0,
                       .parent = parts.parent,
                       .thread = parts.thread,
                       .page_faults = moves ? parts.page_faults : 0,
                       .copies = moves ? parts.copies : 0,
                       .depth = parts.depth,
                       .kind = SpanKind::phase,
                       .name = get_text(parts.names[i])});
    begin = entries.back().end;
  }
  return true;
}

}  // namespace

Process parse(std::span<const std::byte> bytes, const std::string& name) {
  TraceHeader header{};
  if (bytes.size() < sizeof header) refuse(ErrorKind::corrupt, name, "truncated trace");
  std::memcpy(&header, bytes.data(), sizeof header);
  check_magic(header.magic, magic, header.version, name);
  const auto identity = os::parse_identity(get_text(header.identity));
  if (header.record_bytes != sizeof(TraceRecord) || !identity || header.rank < -1 || header.size < 0 ||
      (header.rank >= 0 && header.size == 0) || header.capacity > ring_records)
    refuse(ErrorKind::corrupt, name, "malformed trace header");
  Process process{.identity = *identity,
                  .rank = header.rank,
                  .size = header.size,
                  .job = os::hex_text(header.job),
                  .wall_clock = header.wall_clock};
  // A file may be cut off, and its unused end consists of zeros.
  std::uint64_t count = (bytes.size() - sizeof header) / sizeof(TraceRecord);
  if (header.capacity != 0) count = std::min(count, header.capacity);
  for (std::uint64_t at = 0; at < count; ++at) {
    TraceRecord record{};
    std::memcpy(static_cast<void*>(&record), bytes.data() + sizeof header + at * sizeof record, sizeof record);
    if (record.number == 0) continue;
    const bool is_parts = record.kind == SpanKind::parts && header.capacity == 0;
    if (is_parts && add_parts(record, at, process.entries)) continue;
    if (!is_parts && can_be(record, at, header.capacity))
      process.entries.push_back(entry_of(record));
    else
      ++process.damaged;
  }
  std::ranges::stable_sort(process.entries, {}, &TraceEntry::number);
  return process;
}

Failure parse_failure(std::span<const std::byte> bytes, const std::string& name) {
  FailureHead head{};
  if (bytes.size() < sizeof head) refuse(ErrorKind::corrupt, name, "truncated record of a failure");
  std::memcpy(&head, bytes.data(), sizeof head);
  check_magic(head.magic, failure_magic, head.version, name);
  if (head.rings > (bytes.size() - sizeof head) / ring_bytes)
    refuse(ErrorKind::corrupt, name, "truncated record of a failure");
  Failure failure{get_text(head.words), head.time, head.wall_clock, {}};
  for (std::uint64_t ring = 0; ring < head.rings; ++ring)
    failure.processes.push_back(parse(bytes.subspan(sizeof head + ring * ring_bytes, ring_bytes), name));
  return failure;
}

}  // namespace muster::trace
