// SPDX-License-Identifier: Apache-2.0
// Live exports killed at random moments: `live_export_kill_campaign [COUNT] [SEED]`. Three ranks export tensors in
// their memory, blocking or asynchronously, to a directory that has an older model, and one of them (sometimes all) is
// killed.
//
// The survivors must return within two seconds with an error that names the killed rank, or succeed. The directory must
// have the complete old model or the complete new one. The next export must leave no other file behind.

#include <fmt/core.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "muster/live_export.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t rows = 90;
constexpr std::int64_t columns = 4000;

void export_version(const TemporaryDirectory& work, Group& group, std::uint64_t version, Writers writers,
                    bool is_async) {
  std::vector<TensorPart> parts;
  for (int i = 0; i < 6; ++i)
    parts.push_back(
        {"w" + std::to_string(i),
         pattern(DType::u8, {rows, columns}, seed_of(group.rank(), version * 10 + static_cast<unsigned>(i))),
         {rows, columns * group.size()},
         {0, columns * group.rank()}});
  parts.push_back({"norm", pattern(DType::f32, {64}, version)});
  const ExportOptions options{.force = true, .max_shard_size = 600'000, .memory_budget = 4 << 20, .writers = writers};
  if (is_async)
    export_model_async(parts, work / "out", "", group, options).get();
  else
    export_model(parts, work / "out", "", group, options);
}

bool is_version(const TemporaryDirectory& work, std::uint64_t version) {
  const auto found = tensors_of(work / "out");
  if (found.size() != 7 || !is_pattern(found.at("norm"), DType::f32, {64}, version)) return false;
  for (int i = 0; i < 6; ++i)
    for (int rank = 0; rank < 3; ++rank)
      if (!bitwise_equal(found.at("w" + std::to_string(i)).view().slice(1, columns * rank, columns * (rank + 1)),
                         pattern(DType::u8, {rows, columns}, seed_of(rank, version * 10 + static_cast<unsigned>(i)))))
        return false;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 25;
  std::mt19937 random(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1);
  const TemporaryDirectory work;
  int failures = 0;
  int early = 0;
  double slowest = 0;
  const auto fail = [&](int i, const std::string& words) {
    fmt::print("kill {}: {}\n", i, words);
    ++failures;
  };
  const auto publish = [&](int i, std::uint64_t version) {
    for (const Ended& rank :
         try_ranks(3, [&](Group& group) { export_version(work, group, version, Writers::all, version % 2 == 0); }))
      if (!rank.ok()) fail(i, "an export after a kill ended with: " + rank.words);
    for (const auto& entry : fs::directory_iterator(work.path()))
      if (entry.path().filename() != "out") fail(i, "left behind: " + entry.path().filename().string());
  };
  publish(-1, 0);
  // Moments are spread over the whole job, however fast the machine is.
  const auto start = Clock::now();
  publish(-1, 0);
  const auto longest = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start) * 6 / 5;
  for (int i = 0; i < count; ++i) {
    const auto version = static_cast<std::uint64_t>(i);
    const Writers writers = random() % 2 == 0 ? Writers::rank0 : Writers::all;
    const bool is_async = random() % 2 == 0;
    const int victim = static_cast<int>(random() % 3);
    const bool all = random() % 4 == 0;
    const GroupOf job(3);
    Ranks ranks(3, [&](int rank) {
      std::string words = "unmet";
      try {
        const auto group = job.join(rank, 5s);
        words = "failed";
        export_version(work, *group, version + 1, writers, is_async);
        say("done");
      } catch (const Error& error) {
        say(fmt::format("{} {} {}", words, error.rank().value_or(-1), error.what()));
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(longest.count())));
    for (int rank = 0; rank < 3; ++rank)
      if (all || rank == victim) ranks.signal(rank, SIGKILL);
    const auto begin = Clock::now();
    const auto ended = ranks.wait(20s);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    bool is_done = false;
    bool is_unmet = false;
    for (int rank = 0; rank < 3; ++rank) {
      const Ended& end = ended[static_cast<std::size_t>(rank)];
      is_done = is_done || end.words == "done";
      is_unmet = is_unmet || end.words.starts_with("unmet");
      if (end.signal != SIGKILL && !end.ok()) fail(i, "a rank ended with: " + end.words);
      if (end.words.starts_with("failed") && !all && !end.words.starts_with(fmt::format("failed {} ", victim)))
        fail(i, "a survivor names another rank: " + end.words);
    }
    // Ranks that were killed before the rendezvous are noticed at its deadline.
    if (!is_unmet) slowest = std::max(slowest, seconds);
    if (!is_unmet && seconds > 2) fail(i, fmt::format("the survivors took {:.2f} s", seconds));
    const bool is_new = is_version(work, version + 1);
    if (!is_new && !is_version(work, version)) fail(i, "the output is neither the old model nor the new one");
    if (is_done && !is_new) fail(i, "a rank is done, and the output is the old model");
    if (!is_new) ++early;
    publish(i, version + 1);
  }
  fmt::print("{} kills: {} failures; {} came before the end; the slowest survivors left after {:.2f} s\n", count,
             failures, early, slowest);
  return failures == 0 ? 0 : 1;
}
