// SPDX-License-Identifier: Apache-2.0
// Any bytes as a trace file, a flight recorder or a failure file. They are refused, or yield valid entries.

#include <cstddef>
#include <cstdint>
#include <span>

#include "muster/error.hpp"
#include "src/trace/reading.hpp"
#include "tests/fuzz/target.hpp"

namespace {

using namespace muster::trace;
using muster::test::require;

void check(const Process& process) {
  require(process.rank >= -1 && process.job.size() == 32);
  for (const TraceEntry& entry : process.entries) {
    require(entry.end == 0 || entry.end >= entry.begin);
    require(entry.number != 0 && entry.kind != SpanKind::none && !to_string(entry.kind).empty());
    require(entry.name.size() <= 32 && entry.detail.size() <= 20);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    check(parse(bytes, "fuzz"));
  } catch (const muster::Error&) {
  }
  try {
    for (const Process& process : parse_failure(bytes, "fuzz").processes) check(process);
  } catch (const muster::Error&) {
  }
  return 0;
}
