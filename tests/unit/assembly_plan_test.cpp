// SPDX-License-Identifier: Apache-2.0
// The writers of an export over several hosts, and the messages between them.

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/checkpoint/assembly/assembly.hpp"
#include "src/checkpoint/assembly/export_job.hpp"

using namespace muster;

namespace {

/// Returns files of one tensor each, from four ranks: `merge` of [rows, 64] f32.
std::vector<OutputFile> files_of(int count, const Merge& merge, std::int64_t rows) {
  const std::vector<TensorSpec> specs(4, TensorSpec{DType::f32, {rows, 64}});
  std::vector<OutputFile> files;
  for (int number = 0; number < count; ++number) {
    OutputFile& file = files.emplace_back();
    file.name = "file" + std::to_string(number);
    MergedTensor tensor{"w" + std::to_string(number), merge::join(merge, specs), {}};
    for (int rank = 0; rank < 4; ++rank) tensor.sources.push_back({rank, static_cast<std::uint32_t>(number)});
    file.tensors.push_back(std::move(tensor));
  }
  return files;
}

AssemblyPlan plan_on(const std::vector<OutputFile>& files, const AssemblyShape& shape) {
  const std::vector<RankSources> ranks = {{0, 0}, {1, 0}, {2, 0}, {3, 0}};
  return plan_assembly(files, {}, ranks, shape);
}

/// The hosts whose processes write to each file.
std::map<std::uint32_t, std::set<int>> hosts_of_files(const AssemblyPlan& plan, const AssemblyShape& shape) {
  std::map<std::uint32_t, std::set<int>> hosts;
  for (const ProcessWork& work : plan.processes)
    for (const Step& step : work.steps) hosts[step.file].insert(shape.host_of(static_cast<int>(step.writer)));
  return hosts;
}

std::uint64_t written_on(const AssemblyPlan& plan, const AssemblyShape& shape, int host) {
  std::uint64_t sum = 0;
  for (int process = 0; process < shape.processes; ++process)
    if (shape.host_of(process) == host) sum += plan.processes[static_cast<std::size_t>(process)].written;
  return sum;
}

}  // namespace

TEST_CASE("a window's writer knows the contributors on other hosts, and they know the writer") {
  AssemblyShape shape{4, Writers::all, 64 << 10};
  shape.hosts = {0, 0, 1, 1};
  const AssemblyPlan plan = plan_on(files_of(1, merge::concat(1), 4096), shape);
  int windows = 0;
  for (int process = 0; process < 4; ++process) {
    for (const Step& step : plan.processes[static_cast<std::size_t>(process)].steps) {
      CHECK(step.kind == StepKind::window);
      if (static_cast<int>(step.writer) != process) {
        CHECK(step.senders.empty());
        continue;
      }
      ++windows;
      CHECK(step.contributors == 4);
      CHECK(step.senders == (process < 2 ? std::vector<std::uint32_t>{2, 3} : std::vector<std::uint32_t>{0, 1}));
    }
  }
  CHECK(windows > 4);
  const ProcessWork again = decode_work(encode_work(plan.processes[0]));
  REQUIRE(again.steps.size() == plan.processes[0].steps.size());
  for (std::size_t i = 0; i < again.steps.size(); ++i)
    CHECK(again.steps[i].senders == plan.processes[0].steps[i].senders);
}

TEST_CASE("the work of a process that is cut off, or has a forged count, is refused") {
  const std::vector<std::byte> work = encode_work(plan_on(files_of(2, merge::sum(), 64), {4}).processes[0]);
  const auto refused = [](std::span<const std::byte> bytes) {
    try {
      static_cast<void>(decode_work(bytes));
      return false;
    } catch (const Error& error) {
      return error.kind() == ErrorKind::corrupt;
    }
  };
  CHECK_FALSE(refused(work));
  int forged_counts = 0;
  for (std::size_t at = 0; at < work.size(); ++at) {
    CHECK(refused(std::span(work).first(at)));
    auto forged = work;
    std::fill_n(forged.begin() + static_cast<std::ptrdiff_t>(at), std::min<std::size_t>(8, work.size() - at),
                std::byte{0xff});
    forged_counts += refused(forged);
  }
  CHECK(forged_counts > 8);
  auto longer = work;
  longer.emplace_back();
  CHECK(refused(longer));
}

TEST_CASE("on one host no rank sends") {
  const AssemblyPlan plan = plan_on(files_of(1, merge::concat(1), 4096), {4, Writers::all, 64 << 10});
  for (const ProcessWork& work : plan.processes)
    for (const Step& step : work.steps) CHECK(step.senders.empty());
}

TEST_CASE("one host per file: the whole file is written there, and hosts write about equal amounts") {
  AssemblyShape shape{4, Writers::all, 64 << 10};
  shape.hosts = {0, 1, 1, 0};
  // Row windows: each rank would write its own.
  const auto files = files_of(8, merge::concat(0), 4096);
  bool is_split = false;
  for (const auto& [file, hosts] : hosts_of_files(plan_on(files, shape), shape))
    is_split = is_split || hosts.size() > 1;
  CHECK(is_split);
  shape.one_host_a_file = true;
  const AssemblyPlan plan = plan_on(files, shape);
  for (const auto& [file, hosts] : hosts_of_files(plan, shape)) CHECK(hosts.size() == 1);
  CHECK(written_on(plan, shape, 0) == written_on(plan, shape, 1));
  CHECK(written_on(plan, shape, 0) + written_on(plan, shape, 1) == plan.bytes);
}

TEST_CASE("one host per file: the host that has most of the file") {
  AssemblyShape shape{4, Writers::all, 64 << 10};
  shape.hosts = {0, 0, 0, 1};
  shape.one_host_a_file = true;
  const AssemblyPlan plan = plan_on(files_of(3, merge::concat(0), 1024), shape);
  CHECK(written_on(plan, shape, 1) == 0);
  // Only the root writes, wherever it is.
  shape.writers = Writers::rank0;
  CHECK(plan_on(files_of(3, merge::concat(0), 1024), shape).processes[0].written == plan.bytes);
}

TEST_CASE("windows and messages together are within the budget") {
  for (const Writers writers : {Writers::all, Writers::rank0})
    for (const int processes : {2, 4, 7, 64})
      for (const std::uint64_t budget : {64ULL << 20, 256ULL << 20, 1ULL << 30}) {
        const WindowShape near = shape_windows(budget, processes, writers, false);
        const WindowShape far = shape_windows(budget, processes, writers, true);
        CHECK(far.bytes <= near.bytes);
        const std::uint64_t windows = writers == Writers::rank0 ? far.depth + 1 : (far.depth + 1) * processes;
        CHECK(windows * far.bytes + 3 * processes * WindowMail::piece_bytes(far.bytes) <= budget);
      }
}
