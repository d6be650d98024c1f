// SPDX-License-Identifier: Apache-2.0
// Traces and flight recorders of real ranks. Every operation is recorded, on one clock, even if a rank dies, and
// recording fails no operation.

#include "muster/trace.hpp"

#include <doctest/doctest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/log.hpp"
#include "muster/merge_gather.hpp"
#include "muster/process_group.hpp"
#include "muster/state.hpp"
#include "src/inspect/traces.hpp"
#include "src/trace/rings.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/shared_words.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

const inspect::OutputStyle plain;

/// Waits until the word has the value, without using a group.
void await(std::atomic<std::uint64_t>& word, std::uint64_t value) {
  while (word != value) std::this_thread::sleep_for(1ms);
}

std::vector<const trace::TraceEntry*> entries_of(const trace::Process& process, std::string_view name) {
  std::vector<const trace::TraceEntry*> found;
  for (const trace::TraceEntry& entry : process.entries)
    if (entry.name == name) found.push_back(&entry);
  return found;
}

bool is_in(const trace::Process& process, std::string_view name) {
  return std::ranges::any_of(entries_of(process, name), [](const trace::TraceEntry* entry) { return entry->end == 0; });
}

Config events_of(const inspect::Trace& trace) {
  std::string text;
  inspect::write_events(trace, [&](std::string_view more) { text += more; });
  return parse_json(text);
}

/// Checks all fields that a viewer needs for an event.
bool is_well_formed(const Config& event) {
  if (event.at("ph").as_string() == "M") return event.at("args").is_object() && event.at("pid").as_int() >= 0;
  return event.at("ph").as_string() == "X" && !event.at("name").as_string().empty() &&
         event.at("ts").as_double() >= 0 && event.at("dur").as_double() >= 0 && event.at("pid").as_int() >= 0 &&
         event.at("tid").as_int() > 0 && !event.at("cat").as_string().empty() && event.at("args").is_object();
}

}  // namespace

TEST_CASE("the trace of 10,000 exchanges of four ranks has all of them, each inside its parent operation") {
  constexpr std::size_t exchanges = under_sanitizer ? 1'000 : 10'000;
  const TemporaryDirectory directory;
  {
    const Setting setting("MUSTER_TRACE", directory / "trace");
    run_ranks(4, [](Group& group) {
      RANK_CHECK(is_tracing());
      const TraceSpan loop("loop");
      const Tensor tensor = pattern(DType::u8, {256}, 1);
      for (std::size_t i = 0; i < exchanges; ++i) (void)get_tensors_parallel(tensor, all_ranks, group);
    });
  }
  const inspect::Trace trace = inspect::read_trace(directory / "trace");
  REQUIRE(trace.processes.size() == 4);
  CHECK(trace.notes.empty());
  CHECK(trace.offsets == std::vector<std::int64_t>(4));
  for (std::size_t i = 0; i < 4; ++i) {
    const trace::Process& process = trace.processes[i];
    CHECK(process.rank == static_cast<int>(i));
    CHECK(process.size == 4);
    CHECK(process.job == trace.processes[0].job);
    CHECK(entries_of(process, "loop").size() == 1);
    const auto found = entries_of(process, "get_tensors_parallel");
    REQUIRE(found.size() == exchanges);
    for (std::size_t at = 0; at < found.size(); ++at) {
      // The rendezvous was the group's first operation.
      const bool is_right = found[at]->operation == at + 2 && found[at]->bytes == 256 && found[at]->depth == 1 &&
                            found[at]->detail == "shm" && !found[at]->failed;
      if (!is_right) FAIL("exchange " << at << " of rank " << i << " is another one");
    }
    std::map<std::uint64_t, const trace::TraceEntry*> by_number;
    for (const trace::TraceEntry& entry : process.entries)
      if (entry.kind != trace::SpanKind::phase) by_number[entry.number] = &entry;
    for (const trace::TraceEntry& entry : process.entries) {
      if (entry.parent == 0) continue;
      const auto parent = by_number.find(entry.parent);
      if (parent == by_number.end() || parent->second->begin > entry.begin || parent->second->end < entry.end ||
          parent->second->depth + 1 != entry.depth)
        FAIL("number " << entry.number << " of rank " << i << " is not in its parent");
    }
    CHECK(entries_of(process, "round 1").size() == exchanges);
  }
  const Config events = events_of(trace);
  std::size_t spans = 0;
  for (const trace::Process& process : trace.processes) spans += process.entries.size();
  const ConfigArray& list = events.at("traceEvents").as_array();
  CHECK(list.size() == spans + 2 * 4);
  CHECK(std::ranges::all_of(list, is_well_formed));
  const inspect::TraceSummary summary = inspect::summarize(trace);
  CHECK(summary.operations.size() >= exchanges + 1);
  const auto route = std::ranges::find(summary.routes, "exchange", &inspect::RouteSummary::kind);
  REQUIRE(route != summary.routes.end());
  CHECK(route->bytes == 4 * 256 * exchanges);
}

TEST_CASE("calls of every kind are in the trace, for every thread") {
  const TemporaryDirectory directory;
  {
    const Setting setting("MUSTER_TRACE", directory / "trace");
    run_ranks(3, [](Group& group) {
      const Tensor tensor = pattern(DType::f32, {1024}, 1);
      (void)get_configs_parallel(nullptr, {1, 2}, group);
      (void)merge_tensor_parallel(tensor, merge::Concat{0}, all_ranks, group);
      int layers = 0;
      (void)gather_each([&] { return layers++ < 3 ? std::optional<Config>(tensor) : std::nullopt; }, all_ranks, group,
                        [](const LayerPart&) {});
      ProcessGroup collectives(group);
      const Tensor sum = pattern(DType::f32, {1024}, 2);
      collectives.all_reduce(sum);
      collectives.start([sum](ProcessGroup& own) { own.broadcast(sum, 0); }).get();
      if (group.rank() == 0) collectives.send(tensor, 1);
      if (group.rank() == 1) RANK_CHECK(collectives.recv(sum, any_rank) == 0);
      group.barrier();
      if (group.rank() == 2) group.send(0, std::as_bytes(std::span("words")));
      if (group.rank() == 0) RANK_CHECK(group.receive(2, 100).size() == 6);
    });
  }
  const inspect::Trace trace = inspect::read_trace(directory / "trace");
  REQUIRE(trace.processes.size() == 3);
  for (const trace::Process& process : trace.processes) {
    for (const char* name :
         {"get_configs_parallel", "merge_tensor_parallel", "gather_each", "opening", "parts", "closing", "all_reduce"})
      CHECK_MESSAGE(entries_of(process, name).size() == 1, name);
    CHECK(entries_of(process, "all_reduce").front()->detail == "shared memory");
    CHECK(entries_of(process, "barrier").size() == 2);  // one of them by the rendezvous
    const auto broadcast = entries_of(process, "broadcast");
    REQUIRE(broadcast.size() == 1);
    CHECK(broadcast.front()->thread != entries_of(process, "all_reduce").front()->thread);
    CHECK(broadcast.front()->group != entries_of(process, "all_reduce").front()->group);
    for (const trace::TraceEntry& entry : process.entries) {
      CHECK(entry.end != 0);
      // Only the part that moves the bytes has their faults and copies.
      if (entry.kind == trace::SpanKind::phase && entry.bytes == 0) CHECK(entry.page_faults + entry.copies == 0);
    }
  }
  const auto send = entries_of(trace.processes[0], "send");
  REQUIRE(send.size() == 1);
  CHECK(send.front()->peer == 1);
  CHECK(send.front()->bytes == 4096);
  CHECK(entries_of(trace.processes[1], "recv").front()->bytes == 4096);
  CHECK(entries_of(trace.processes[0], "receive").back()->peer == 2);
  CHECK(entries_of(trace.processes[1], "gather_each").front()->done == 3 * 4096);
}

TEST_CASE("clocks that differ by a time namespace are aligned") {
  const TemporaryDirectory directory;
  const Setting setting("MUSTER_TRACE", directory / "trace");
  const GroupOf meeting(3);
  run_processes(3, [&](int rank) {
    const auto work = [&] {
      const auto group = meeting.join(rank);
      for (int i = 0; i < 200; ++i) group->barrier();
    };
    if (rank == 0) return work();
    // Rank 1 is an hour ahead and rank 2 a second behind. The offset applies to children of this process.
    if (::unshare(CLONE_NEWTIME) != 0) return say("no time namespaces"), work();
    std::ofstream("/proc/self/timens_offsets") << "monotonic " << (rank == 1 ? 3600 : -1) << " 0" << std::flush;
    const pid_t child = ::fork();
    if (child == 0) {
      int status = 1;
      try {
        work();
        status = 0;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
      }
      ::_exit(status);
    }
    int status = 0;
    RANK_CHECK(::waitpid(child, &status, 0) == child && status == 0);
  });
  const inspect::Trace trace = inspect::read_trace(directory / "trace");
  REQUIRE(trace.processes.size() == 3);
  if (entries_of(trace.processes[1], "barrier").front()->begin <
      entries_of(trace.processes[0], "barrier").front()->begin + 1'000'000'000) {
    MESSAGE("skipped: this user can make no time namespace");
    return;
  }
  CHECK(trace.notes.empty());
  CHECK(std::abs(trace.offsets[1] - 3'600'000'000'000) < 50'000);
  CHECK(std::abs(trace.offsets[2] + 1'000'000'000) < 50'000);
}

TEST_CASE("the operation of a killed rank is visible through a live rank, and in a file when all are gone") {
  const TemporaryDirectory directory;
  const Setting setting("TMPDIR", directory.path().string());
  SharedWords words;
  const GroupOf meeting(4);
  Ranks ranks(4, [&](int rank) {
    const auto group = meeting.join(rank);
    ++words[0];
    await(words[1], 1);
    if (rank == 3) await(words[2], 1);  // rank 3 does not reach the barrier
    const TraceSpan step("step");
    if (rank == 2) words[3] = 1;
    const Error error = error_of(ErrorKind::peer_lost, {"rank 2", "muster status"}, [&] { group->barrier(); });
    ++words[4];
    await(words[2], 1);
  });
  await(words[0], 4);
  words[1] = 1;
  const std::string pid = std::to_string(ranks.pid(0));
  const auto in_barrier = [&](int rank) {
    const auto jobs = inspect::last_words(pid);
    return is_in(jobs.at(0).processes.at(static_cast<std::size_t>(rank)), "barrier");
  };
  while (!in_barrier(0) || !in_barrier(1) || !in_barrier(2)) std::this_thread::sleep_for(1ms);
  {
    const auto jobs = inspect::last_words(pid);
    REQUIRE(jobs.size() == 1);
    REQUIRE(jobs[0].processes.size() == 4);
    CHECK(is_in(jobs[0].processes[2], "step"));
    const trace::TraceEntry& barrier = *entries_of(jobs[0].processes[2], "barrier").back();
    CHECK(barrier.operation == 2);
    CHECK(barrier.group == entries_of(jobs[0].processes[0], "barrier").back()->group);
    const auto launched = inspect::last_words(std::to_string(::getpid()));
    REQUIRE(launched.size() == 1);
    CHECK(launched[0].job == jobs[0].job);
  }
  ranks.signal(2, SIGKILL);
  await(words[4], 2);
  std::string job;
  {
    const auto jobs = inspect::last_words(pid);
    REQUIRE(jobs.size() == 1);
    REQUIRE(jobs[0].processes.size() == 4);
    job = jobs[0].job;
    CHECK(jobs[0].source.empty());
    CHECK(is_in(jobs[0].processes[2], "barrier"));
    CHECK_FALSE(is_in(jobs[0].processes[0], "barrier"));
    const std::string text = inspect::last_text(jobs, plain);
    CHECK(text.find("dead") != std::string::npos);
    CHECK(inspect::last_tree(jobs).at("jobs").at(0).at("ranks").at(2).at("state").as_string() == "dead");
  }
  words[2] = 1;
  const auto ended = ranks.wait();
  CHECK(ended[0].ok());
  CHECK(ended[1].ok());
  const auto jobs = inspect::last_words(job);
  REQUIRE(jobs.size() == 1);
  CHECK_FALSE(jobs[0].source.empty());
  CHECK(jobs[0].words.find("rank 2") != std::string::npos);
  REQUIRE(jobs[0].processes.size() == 4);
  CHECK(is_in(jobs[0].processes[2], "barrier"));
  CHECK(is_in(jobs[0].processes[2], "step"));
  CHECK_FALSE(is_in(jobs[0].processes[3], "barrier"));
  struct stat status {};
  REQUIRE(::stat(trace::failure_directory().c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0700);
  CHECK(trace::failures_in(trace::failure_directory()).size() == 1);
}

TEST_CASE("a stopped rank is reported as stopped, and a timeout names the command that inspects it") {
  const TemporaryDirectory directory;
  const Setting setting("TMPDIR", directory.path().string());
  SharedWords words;
  const GroupOf meeting(2);
  Ranks ranks(2, [&](int rank) {
    const auto group = meeting.join(rank, 700ms);
    ++words[0];
    await(words[1], 1);
    if (rank == 1) ::raise(SIGSTOP);
    error_of(ErrorKind::timeout, {"muster status", "stopped"}, [&] { group->barrier(); });
    await(words[2], 1);
  });
  await(words[0], 2);
  words[1] = 1;
  const std::string pid = std::to_string(ranks.pid(0));
  std::string state;
  while (state != "stopped")
    state = inspect::last_tree(inspect::last_words(pid)).at("jobs").at(0).at("ranks").at(1).at("state").as_string();
  words[2] = 1;
  const auto ended = ranks.wait_and_kill(1, 10s);
  CHECK_MESSAGE(ended[0].ok(), ended[0].words);
}

TEST_CASE("jobs that succeed leave no file, and failed jobs at most eight files of this user") {
  const TemporaryDirectory directory;
  const Setting setting("TMPDIR", directory.path().string());
  run_ranks(2, [](Group& group) { group.barrier(); });
  CHECK(directory.count() == 0);
  const auto fail = [] {
    const GroupOf meeting(2);
    run_processes(2, {1}, [&](int rank) {
      const auto group = meeting.join(rank);
      if (rank == 1) ::raise(SIGKILL);
      error_of(ErrorKind::peer_lost, {"rank 1"}, [&] { group->barrier(); });
    });
  };
  const std::string own = trace::failure_directory();
  // Another user has put a link at the directory's name.
  std::filesystem::create_directory(directory / "elsewhere");
  std::filesystem::create_symlink(directory / "elsewhere", own);
  fail();
  CHECK(std::filesystem::is_empty(directory / "elsewhere"));
  std::filesystem::remove(own);
  std::filesystem::create_directory(own);
  std::filesystem::permissions(own, std::filesystem::perms(0755));
  fail();
  CHECK(std::filesystem::is_empty(own));
  std::filesystem::remove(own);
  for (int i = 0; i < 10; ++i) fail();
  CHECK(trace::failures_in(own).size() == 8);
  CHECK(test::names_in(own).size() == 8);
  // A traced job also leaves a file in the directory of the trace. Its message is found in both places.
  const std::string traces = directory / "trace";
  {
    const Setting traced("MUSTER_TRACE", traces);
    fail();
  }
  CHECK(trace::failures_in(traces).size() == 1);
  const auto of_trace = inspect::last_words(traces);
  REQUIRE(of_trace.size() == 1);
  CHECK(of_trace[0].words.find("rank 1") != std::string::npos);
  const auto of_job = inspect::last_words(of_trace[0].job);
  REQUIRE(of_job.size() == 1);
  CHECK(of_job[0].source.starts_with(own));
  CHECK(of_job[0].words == of_trace[0].words);
}

TEST_CASE("a full disk ends the trace with one line, and the job continues") {
  const TemporaryDirectory directory;
  const Setting setting("MUSTER_TRACE", directory / "trace");
  run_processes(1, [&](int) {
    const rlimit limit{3 << 20, 3 << 20};
    RANK_CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    static int lines = 0;
    set_log_hook([](LogLevel, std::string_view words) {
      if (words.find("tracing stops") != std::string_view::npos) ++lines;
    });
    for (int i = 0; i < 60'000; ++i) const TraceSpan span("step");
    RANK_CHECK(!is_tracing());
    RANK_CHECK(lines == 1);
  });
  const inspect::Trace trace = inspect::read_trace(directory / "trace");
  REQUIRE(trace.processes.size() == 1);
  CHECK(trace.processes[0].entries.size() == (3 << 20) / 128 - 2);
}

TEST_CASE("if no trace can be written there is one warning, and the job continues") {
  const TemporaryDirectory directory;
  write_text(directory / "file", "no directory");
  const Setting setting("MUSTER_TRACE", directory / "file");
  run_processes(1, [&](int) {
    static int lines = 0;
    set_log_hook([](LogLevel, std::string_view words) {
      if (words.find("MUSTER_TRACE") != std::string_view::npos) ++lines;
    });
    for (int i = 0; i < 10; ++i) {
      const TraceSpan span("step");
      single_group()->barrier();
    }
    RANK_CHECK(!is_tracing());
    RANK_CHECK(lines == 1);
  });
}

TEST_CASE("a forked child records nothing for its parent, and its own operations in its own file") {
  const TemporaryDirectory directory;
  const Setting setting("MUSTER_TRACE", directory / "trace");
  run_processes(1, [&](int) {
    const TraceSpan outer("parent");
    const pid_t child = ::fork();
    if (child == 0) {
      { const TraceSpan span("child"); }
      ::_exit(0);
    }
    int status = 1;
    RANK_CHECK(::waitpid(child, &status, 0) == child && status == 0);
  });
  inspect::Trace trace = inspect::read_trace(directory / "trace");
  REQUIRE(trace.processes.size() == 2);
  for (const trace::Process& process : trace.processes) {
    REQUIRE(process.entries.size() == 1);
    CHECK(process.entries[0].end != 0);
    CHECK(process.entries[0].depth == 0);
  }
  CHECK(trace.processes[0].entries[0].name != trace.processes[1].entries[0].name);
}

TEST_CASE("a failed operation is reported as failed, and waits are attributed to the rank that caused them") {
  const TemporaryDirectory directory;
  {
    const Setting setting("MUSTER_TRACE", directory / "trace");
    SharedWords words;
    run_ranks(3, [&](Group& group) {
      // Rank 1 arrives last.
      for (int i = 0; i < 5; ++i) {
        if (group.rank() == 1) await(words[0], 2 * (static_cast<std::uint64_t>(i) + 1));
        if (group.rank() == 1) std::this_thread::sleep_for(2ms);
        if (group.rank() != 1) ++words[0];
        group.barrier();
      }
      const TraceSpan step("step");
      error_of(ErrorKind::invalid_argument, {}, [&] { (void)get_tensors_parallel(Tensor(), {0, 0}, group); });
    });
  }
  const inspect::Trace trace = inspect::read_trace(directory / "trace");
  REQUIRE(trace.processes.size() == 3);
  for (const trace::Process& process : trace.processes) {
    CHECK(entries_of(process, "get_tensors_parallel").at(0)->failed);
    CHECK_FALSE(entries_of(process, "step").at(0)->failed);
  }
  const inspect::TraceSummary summary = inspect::summarize(trace);
  CHECK(summary.ranks[2].waiting_seconds > 0.008);
  CHECK(summary.ranks[1].caused_seconds > 0.016);
  const auto times = inspect::step_times(trace);
  CHECK(std::ranges::find(times[0], "step", &StepTimes::step) != times[0].end());
  CHECK(inspect::trace_text(trace, summary, plain).find("rank 1") != std::string::npos);
}
