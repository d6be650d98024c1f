// SPDX-License-Identifier: Apache-2.0
// Merges traces: clocks that differ, damaged files, the numbers of the summary, and the reports of steps.

#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "muster/trace.hpp"
#include "src/inspect/traces.hpp"
#include "src/trace/rings.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;

namespace {

constexpr std::uint64_t second = 1'000'000'000;
const inspect::OutputStyle plain;

/// Returns a trace of ranks that make collectives. The members arrive within a millisecond, and leave some microseconds
/// after the last one has arrived. `ahead` is the offset of each rank's clock.
inspect::Trace trace_of(const std::vector<std::int64_t>& ahead, const std::vector<std::string>& hosts, int operations) {
  std::mt19937_64 random(1);
  inspect::Trace trace;
  for (std::size_t rank = 0; rank < ahead.size(); ++rank) {
    trace::Process process;
    process.rank = static_cast<int>(rank);
    process.size = static_cast<int>(ahead.size());
    process.identity.host = hosts[rank];
    process.job = std::string(32, 'a');
    trace.processes.push_back(process);
  }
  for (int i = 0; i < operations; ++i) {
    const std::uint64_t start = 5000 * second + static_cast<std::uint64_t>(i) * 10'000'000;
    std::vector<std::uint64_t> begins;
    for (std::size_t rank = 0; rank < ahead.size(); ++rank) begins.push_back(start + random() % 1'000'000);
    const std::uint64_t last = *std::ranges::max_element(begins);
    for (std::size_t rank = 0; rank < ahead.size(); ++rank) {
      const std::uint64_t end = last + 1'000 + random() % 20'000;
      const auto shift = static_cast<std::uint64_t>(ahead[rank]);
      trace.processes[rank].entries.push_back({.number = static_cast<std::uint64_t>(i) + 1,
                                               .begin = begins[rank] + shift,
                                               .end = end + shift,
                                               .bytes = 1000,
                                               .group = 7,
                                               .operation = static_cast<std::uint64_t>(i) + 1,
                                               .thread = 1,
                                               .kind = trace::SpanKind::collective,
                                               .name = "all_reduce",
                                               .detail = "route"});
    }
  }
  inspect::align(trace);
  return trace;
}

std::vector<std::byte> file_of(const std::vector<trace::TraceRecord>& records) {
  trace::TraceHeader header{};
  std::ranges::copy(trace::magic, header.magic.begin());
  header.version = trace::version;
  header.record_bytes = sizeof(trace::TraceRecord);
  header.rank = 0;
  header.size = 1;
  std::strcpy(header.identity.data(), "host,0123456789abcdef,1,2,3");
  std::vector<std::byte> bytes(sizeof header + records.size() * sizeof(trace::TraceRecord));
  std::memcpy(bytes.data(), &header, sizeof header);
  for (std::size_t i = 0; i < records.size(); ++i)
    std::memcpy(bytes.data() + sizeof header + i * sizeof(trace::TraceRecord), &records[i], sizeof(trace::TraceRecord));
  return bytes;
}

trace::TraceRecord record_of(std::uint64_t number) {
  trace::TraceRecord record{};
  record.number = number;
  record.begin = 10;
  record.end = 20;
  record.kind = trace::SpanKind::program;
  std::strcpy(record.name.data(), "step");
  return record;
}

RankTimes times(std::initializer_list<StepTimes> steps) {
  return steps;
}

}  // namespace

TEST_CASE("clocks are aligned within 50 us, and clocks of one host are treated as one") {
  // each subcase has hosts, and the offset of each clock from the first one
  const auto near = [](std::int64_t found, std::int64_t true_one) { return std::abs(found - true_one) < 50'000; };
  SUBCASE("one host") {
    const auto trace = trace_of({0, 0, 0, 0}, {"a", "a", "a", "a"}, 200);
    CHECK(trace.offsets == std::vector<std::int64_t>(4));
  }
  SUBCASE("two hosts of two ranks") {
    constexpr std::int64_t ahead = 123'456'789'012;
    const auto trace = trace_of({0, 0, ahead, ahead}, {"a", "a", "b", "b"}, 200);
    CHECK(trace.offsets[1] == 0);
    CHECK(near(trace.offsets[2], ahead));
    CHECK(trace.offsets[3] == trace.offsets[2]);
  }
  SUBCASE("every host has another clock") {
    const std::vector<std::int64_t> ahead = {0, -7 * static_cast<std::int64_t>(second), 300'000, 42};
    const auto trace = trace_of(ahead, {"a", "b", "c", "d"}, 200);
    for (std::size_t i = 0; i < ahead.size(); ++i) CHECK(near(trace.offsets[i], ahead[i]));
    CHECK(trace.notes.empty());
  }
  SUBCASE("no operation in common") {
    const auto trace = trace_of({0, 5}, {"a", "b"}, 0);
    CHECK(trace.offsets == std::vector<std::int64_t>(2));
  }
}

TEST_CASE("a clock that drifts is reported") {
  auto trace = trace_of({0, 0}, {"a", "b"}, 100);
  for (trace::TraceEntry& entry : trace.processes[1].entries) {
    const std::uint64_t drift = entry.operation * 1'000'000;
    entry.begin += drift;
    entry.end += drift;
  }
  inspect::align(trace);
  REQUIRE(trace.notes.size() == 1);
  CHECK(has(trace.notes[0], "rank 1"));
}

TEST_CASE("the summary counts waits, the ranks that caused them, and routes") {
  auto trace = trace_of({0, 0, 0}, {"a", "a", "a"}, 10);
  // Rank 2 is late once, by a second.
  trace.processes[2].entries[4].begin += second;
  for (trace::Process& process : trace.processes) process.entries[4].end += second;
  // A failed operation is not counted.
  for (trace::Process& process : trace.processes) process.entries[5].failed = true;
  const inspect::TraceSummary summary = inspect::summarize(trace);
  CHECK(summary.operations.size() == 9);
  CHECK(summary.ranks[0].longest_wait > 0.99);
  CHECK(summary.ranks[0].longest_operation == "all_reduce 5");
  CHECK(summary.ranks[0].longest_for == 2);
  CHECK(summary.ranks[2].caused_seconds > 1.98);
  REQUIRE(summary.routes.size() == 1);
  CHECK(summary.routes[0].operations == 9);
  CHECK(summary.routes[0].bytes == 9 * 3 * 1000);
  // From the first rank's begin to the last one's end.
  CHECK(summary.routes[0].seconds > 1);
  CHECK(has(inspect::trace_text(trace, summary, plain), "The other ranks waited longest for rank 2"));
}

TEST_CASE("a rank that does not begin an operation is the one that the others wait for") {
  auto trace = trace_of({0, 0, 0}, {"a", "a", "a"}, 3);
  // Rank 1 begins neither the last operation nor the first one of a group of all ranks, whose ID is that of the job.
  trace.processes[1].entries.pop_back();
  for (trace::Process& process : trace.processes) process.job = "0700000000000000" + std::string(16, '0');
  trace.processes[0].entries.back().end = 0;
  trace.processes[2].entries.back().failed = true;
  trace.processes[2].entries.back().end += 2 * second;
  trace.end = static_cast<std::int64_t>(trace.processes[0].entries.back().begin + 3 * second);
  for (const bool has_begun : {true, false}) {
    CAPTURE(has_begun);
    if (!has_begun) trace.processes[1].entries.clear();
    inspect::TraceSummary summary = inspect::summarize(trace);
    REQUIRE(summary.missed.size() == 1);
    CHECK(summary.missed[0].operation == "all_reduce 3");
    CHECK(summary.missed[0].missing == std::vector<std::size_t>{1});
    CHECK(summary.operations.size() == 2);
    CHECK(summary.ranks[0].longest_for == 1);
    CHECK(summary.ranks[0].longest_wait == doctest::Approx(3));
    CHECK(summary.ranks[1].caused_seconds > 5);
    const std::string text = inspect::trace_text(trace, summary, plain);
    CHECK(has(text, "The other ranks waited longest for rank 1"));
    CHECK(has(text, "all_reduce 3: ranks 0, 2 waited for rank 1, which did not begin it"));
    inspect::sort(summary, inspect::RankOrder::caused);
    CHECK(summary.order.front() == 1);
    CHECK(inspect::trace_tree(trace, summary).at("missed").at(0).at("waiting").at(1) == Config(2));
  }
}

TEST_CASE("status shows the last of the operations that ended in one tick, and processes in no group") {
  trace::Process process;
  process.size = 1;
  process.rank = 0;
  for (std::uint64_t number = 1; number <= 12; ++number)
    process.entries.push_back({.number = number,
                               .end = 50,
                               .group = 7,
                               .operation = number,
                               .kind = trace::SpanKind::collective,
                               .name = "b"});
  trace::Process alone;
  alone.job = std::string(32, '0');
  const std::vector<inspect::LastWords> jobs = {{.job = "aa", .source = "file", .time = 100, .processes = {process}},
                                                {.source = "file", .time = 100, .processes = {alone}}};
  const std::string text = inspect::last_text(jobs, plain);
  CHECK(has(text, "12  "));
  CHECK(has(text, "1 process in no group"));
  CHECK_FALSE(has(text, "job 0"));
  const Config tree = inspect::last_tree(jobs);
  CHECK(tree.at("jobs").at(0).at("ranks").at(0).at("last").at("operation") == Config(12));
  CHECK(tree.at("jobs").at(1).at("job").is_null());
  CHECK(tree.at("jobs").at(1).at("ranks").at(0).at("rank").is_null());
}

TEST_CASE("invalid records are left out, and invalid files are refused") {
  std::vector<trace::TraceRecord> records = {record_of(1), record_of(2), record_of(4), record_of(4),
                                             record_of(5), record_of(6), record_of(7), {}};
  records[1].end = 5;                                                // before its begin
  records[3].kind = static_cast<trace::SpanKind>(200);               // of an unknown kind
  records[4].parent = 5;                                             // its own parent
  records[5].begin = records[5].end = ~std::uint64_t{0};             // longer than machines run
  std::memset(records[6].name.data(), 'x', records[6].name.size());  // does not end
  const std::vector<std::byte> bytes = file_of(records);
  const trace::Process process = trace::parse(bytes, "file");
  CHECK(process.damaged == 5);
  REQUIRE(process.entries.size() == 2);
  CHECK(process.entries[1].name == std::string(32, 'x'));
  // The file is truncated at any byte.
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    const std::span<const std::byte> part = std::span(bytes).first(length);
    if (length < sizeof(trace::TraceHeader))
      thrown_by(ErrorKind::corrupt, [&] { (void)trace::parse(part, "file"); });
    else
      CHECK(trace::parse(part, "file").entries.size() <= 2);
  }
  auto other = bytes;
  other[8] = std::byte{9};
  thrown_by(ErrorKind::version, [&] { (void)trace::parse(other, "file"); });
}

TEST_CASE("a directory without a trace, and one with damaged files") {
  const TemporaryDirectory directory;
  thrown_by(ErrorKind::not_found, [&] { (void)inspect::read_trace(directory.path().string()); });
  write_text(directory / ("bad" + std::string(trace::file_suffix)), "nothing");
  CHECK(inspect::read_trace(directory.path().string()).notes.size() == 1);
}

TEST_CASE("load imbalance: missing ranks, different steps, and sums") {
  const std::vector<RankTimes> ranks = {
      times({{"forward", {1, 2, 3}}, {"backward", {4, 4}}}),
      times({{"forward", {3, 2, 1}}, {"backward", {2, 6, 9}}, {"write", {1}}}),
  };
  const ImbalanceReport report = report_load_imbalance(ranks);
  REQUIRE(report.steps.size() == 2);
  CHECK(report.steps[0].step == "forward");
  CHECK(report.steps[0].iterations == 3);
  CHECK(report.steps[0].useful_seconds == doctest::Approx(6));
  CHECK(report.steps[0].waiting_seconds == doctest::Approx(2));
  CHECK(report.steps[1].iterations == 2);
  CHECK(report.steps[1].useful_seconds == doctest::Approx(8));
  CHECK(report.steps[1].waiting_seconds == doctest::Approx(2));
  CHECK(report.useful_seconds == doctest::Approx(14));
  REQUIRE(report.warnings.size() == 2);
  CHECK(has(report.warnings[0], "only the first 2 iterations count"));
  CHECK(has(report.warnings[1], "\"write\" is left out: it is missing on ranks 0"));
  CHECK(has(to_string(report), "forward (3 times): 6.000000 s useful, 2.000000 s waiting (25.0 %)\n"));

  const TimeReport info = report_time_info(ranks);
  REQUIRE(info.steps.size() == 3);
  CHECK(info.steps[1].largest_total == doctest::Approx(17));
  CHECK(info.steps[1].mean_total == doctest::Approx(12.5));
  CHECK(info.steps[1].mean_seconds[1] == doctest::Approx(17.0 / 3));
  CHECK(info.steps[2].step == "write");
  CHECK(info.steps[2].iterations == std::vector<std::size_t>{0, 1});
  CHECK(info.steps[2].mean_total == doctest::Approx(1));
  CHECK(has(to_string(info), "write, rank 1: mean 1.000000 s, total 1.000000 s\nwrite: largest total 1.000000 s"));

  CHECK(report_load_imbalance({}).steps.empty());
  const std::vector<RankTimes> twice = {times({{"a", {1}}, {"a", {1}}})};
  thrown_by(ErrorKind::invalid_argument, [&] { (void)report_load_imbalance(twice); });
  const std::vector<RankTimes> negative = {times({{"a", {-1}}})};
  thrown_by(ErrorKind::invalid_argument, [&] { (void)report_time_info(negative); });
}
