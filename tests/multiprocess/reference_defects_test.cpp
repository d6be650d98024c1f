// SPDX-License-Identifier: Apache-2.0
// Defects of the reference (ModelOpt 0.47) that Muster does not have. The cases have the names by which users reported
// them. Those about a workspace are in the tests of the workspace route.

#include <signal.h>

#include <thread>

#include "doctest/doctest.h"
#include "muster/state.hpp"
#include "tests/support/exchanges.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

const std::vector<int> three = {0, 1, 2};

}  // namespace

TEST_CASE("another job exits normally, or is killed: this job continues") {
  const GroupOf ours(3);
  Ranks ranks(3, [&](int rank) {
    const auto group = ours.join(rank);
    for (int i = 0; i < 200; ++i) {
      gather_and_check(*group, three, 5000, 0);
      std::this_thread::sleep_for(1ms);
    }
  });
  for (int i = 0; i < 6; ++i)
    try_ranks(3, [&](Group& group) {
      for (int k = 0; k < 5; ++k) gather_and_check(group, three, 5000, 1);
      if (i % 2 == 1) ::raise(SIGKILL);
    });
  check_ended(ranks.wait());
}

TEST_CASE("configs that arrived with other types") {
  const Tensor storage = pattern(DType::bf16, {4096, 64}, 5);
  std::vector<std::pair<std::string, Config>> cases = {
      {"a config with no tensor", Config::object({{"type", "linear"}, {"bits", 4}})},
      {"an empty config", Config::object()},
      {"no config at all", Config()},
      {"a plain dict as config", parse_json(R"({"a": {"b": [1, {"c": null}]}, "d": "text"})")},
      {"a string that equals a tensor's key", Config::object({{"weight", pattern(DType::f32, {3}, 1)},
                                                              {"name", "weight"},
                                                              {"_tensor_weight", "weight"},
                                                              {"$tensor", "weight"}})},
      {"a slice of a larger storage", Config::object({{"slice", Tensor::borrow(storage.view().slice(0, 17, 19))},
                                                      {"column", Tensor::borrow(storage.view().slice(1, 3, 4))}})}};
  for (const int count : {39, 40, 41, 500}) {
    Config& config = cases.emplace_back("a config of " + std::to_string(count) + " small tensors", Config()).second;
    for (int i = 0; i < count; ++i)
      config["t" + std::to_string(i)] = pattern(DType::f32, {4}, static_cast<std::uint64_t>(i));
  }
  for (const auto& [name, config] : cases) {
    CAPTURE(name);
    CHECK(join(split(config)) == config);
    run_ranks(3, [&name = name, &config = config](Group& group) {
      const GatheredConfigs all = get_configs_parallel(&config, three, group);
      RANK_CHECK(all.present().size() == (group.rank() == 0 ? 3U : 0U));
      for (const auto& [rank, other] : all.present()) RANK_CHECK(other == config);
      // Two rows and a column of a slice are sent, not the storage.
      if (name.starts_with("a slice"))
        for (const PhaseReport& phase : all.report().phases) RANK_CHECK(phase.bytes < 10000);
    });
  }
}

TEST_CASE("all processes are killed: nothing remains, and the next job works") {
  const auto before = shared_memory_names();
  for (const char* backing : {"memfd", "posix"}) {
    const Setting shm("MUSTER_SHM", backing);
    for (int i = 0; i < 5; ++i) {
      const GroupOf job(3);
      {
        Ranks ranks(3, [&](int rank) {
          const auto group = job.join(rank);
          for (;;) gather_and_check(*group, three, 200000, 0);
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(20 + 7 * i));
        for (int rank = 0; rank < 3; ++rank) ranks.signal(rank, SIGKILL);
        ranks.wait();
      }
      CHECK(shared_memory_names() == before);
      // The same key again.
      run_processes(3, [&](int rank) { gather_and_check(*job.join(rank), three, 200000, 0); });
    }
  }
}

TEST_CASE("after success nothing remains, and other users could not read the shared data") {
  const auto before = shared_memory_names();
  for (const char* backing : {"memfd", "posix"}) {
    const Setting shm("MUSTER_SHM", backing);
    run_ranks(3, [&](Group& group) {
      const GatheredTensors all = get_tensors_parallel(pattern(DType::f32, {100000}, 1), three, group);
      group.barrier();
      RANK_CHECK(shared_memory_names() == before);  // not even while it is in use
    });
  }
  CHECK(shared_memory_names() == before);
}
