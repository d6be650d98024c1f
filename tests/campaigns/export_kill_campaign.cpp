// SPDX-License-Identifier: Apache-2.0
// Exports killed at random moments: `export_kill_campaign [COUNT] [SEED]`. Three ranks export to a directory that has
// an older model, and one of them (sometimes all) is killed.
//
// The survivors must return within two seconds with an error that names a killed rank. The directory must have the
// complete old model or, if the kill came too late, the complete new one. In every other run the file system has no
// atomic exchange of names: then the old model may be stored under another name, and the next export restores it. Every
// few kills a resumed export must complete the work of the killed ones, and leave no other file.

#include <fmt/core.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "muster/export.hpp"
#include "src/checkpoint/model/output_directory.hpp"
#include "src/os/fault.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/models.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

// The report of a rank if another one was killed before the rendezvous.
constexpr const char* unmet = "waited for a rank until the rendezvous ended";

bool is_same(const std::string& a, const std::string& b) {
  const auto left = tensors_of(a);
  const auto right = tensors_of(b);
  if (left.size() != right.size()) return false;
  for (const auto& [name, tensor] : left)
    if (!right.contains(name) || !bitwise_equal(tensor, right.at(name))) return false;
  return true;
}

void export_to(const TemporaryDirectory& work, SyncGroup& group, Writers writers) {
  export_model(work / "shards", work / "out", "llama", group,
               {.force = true, .max_shard_size = 60'000, .memory_budget = 4 << 20, .writers = writers, .resume = true});
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 25;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  std::mt19937 random(seed);
  const TemporaryDirectory work;
  inspect::write_demo_model(llama(), work / "model", 1 << 30);
  inspect::write_demo_model(bert(), work / "old", 1 << 30);
  shard_model(work / "model", work / "shards", "llama", {.tensor = 3});
  fs::copy(work / "old", work / "out");

  int failures = 0;
  int early = 0;
  int resumed = 0;
  int parked = 0;
  double slowest = 0;
  const auto fail = [&](int i, const std::string& words) {
    fmt::print("kill {}: {}\n", i, words);
    ++failures;
  };
  for (int i = 0; i < count; ++i) {
    const Writers writers = random() % 2 == 0 ? Writers::first : Writers::owners;
    const int victim = static_cast<int>(random() % 3);
    const bool all = random() % 4 == 0;
    const bool without_exchange = random() % 2 == 0;
    const GroupOf job(3);
    Ranks ranks(3, [&](int rank) {
      bool has_met = false;
      if (without_exchange)
        os::set_fault_hook([](std::string_view call, std::string_view) { return call == "exchange" ? EINVAL : 0; });
      try {
        const auto group = job.join(rank, 5s);
        has_met = true;
        export_to(work, *group, writers);
        say("done");
      } catch (const Error& error) {
        say(error.kind() == ErrorKind::timeout && !has_met
                ? unmet
                : fmt::format("failed {} {}", error.rank().value_or(-1), error.what()));
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60'000));
    for (int rank = 0; rank < 3; ++rank)
      if (all || rank == victim) ranks.signal(rank, SIGKILL);
    const auto begin = Clock::now();
    const auto ended = ranks.wait(20s);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    std::string words;
    for (const Ended& rank : ended) words += " | " + rank.words;
    // The other ranks cannot detect a rank that was killed before the rendezvous until their deadline.
    if (words.find(unmet) == std::string::npos) {
      slowest = std::max(slowest, seconds);
      if (seconds > 2) fail(i, fmt::format("the survivors took {:.2f} s{}", seconds, words));
    }
    bool someone_done = false;
    for (const Ended& rank : ended) {
      someone_done = someone_done || rank.words == "done";
      if (rank.signal != SIGKILL && !rank.ok()) fail(i, "a rank ended with: " + rank.words);
    }
    if (!fs::exists(work / "out")) {
      ++parked;
      if (!without_exchange) fail(i, "there is no output");
      try {
        const OutputDirectory put_back(work / "out");
      } catch (const Error&) {  // the directory is restored
      }
    }
    const bool is_new = is_same(work / "model", work / "out");
    if (!is_new && !is_same(work / "old", work / "out")) fail(i, "the output is neither the old model nor the new one");
    if (someone_done && !is_new) fail(i, "a rank says that it is done, and the output is the old one");
    if (!is_new) ++early;
    if (i % 5 == 4 || is_new) {
      const auto end = try_ranks(3, [&](SyncGroup& group) { export_to(work, group, writers); });
      for (const Ended& rank : end)
        if (!rank.ok()) fail(i, "a resumed export ended with: " + rank.words);
      if (!is_same(work / "model", work / "out")) fail(i, "a resumed export gave another model");
      for (const auto& entry : fs::directory_iterator(work.path()))
        if (const std::string name = entry.path().filename(); name.starts_with("out.")) fail(i, "left behind: " + name);
      ++resumed;
      fs::remove_all(work / "out");
      fs::copy(work / "old", work / "out");
    }
  }
  fmt::print(
      "{} kills: {} failures; {} came before the end; {} parked; {} resumed; the slowest survivors left after {:.2f} "
      "s\n",
      count, failures, early, parked, resumed, slowest);
  return failures == 0 ? 0 : 1;
}
