// SPDX-License-Identifier: Apache-2.0
// Every built-in plan, every way to cut: cut for ranks and put together again, or cut anew for others without a
// checkpoint between, a model is the same, bit for bit.

#include <doctest/doctest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "muster/export.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/shard_files.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/models.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
namespace fs = std::filesystem;

namespace {

struct Case {
  const char* plan;
  inspect::DemoModel model;
};

std::vector<Case> cases() {
  return {{"llama", test::llama()},
          {"auto", test::llama(true)},
          {"gpt-neox", test::gpt_neox()},
          {"bert", test::bert()},
          {"moe", test::mixtral()}};
}

void export_by(int ranks, const std::string& shards, const std::string& out, const std::string& plan,
               const ExportOptions& options) {
  test::run_ranks(ranks, [&](SyncGroup& group) {
    const ExportReport report = export_model(shards, out, plan, group, options);
    if (group.rank() != 0) return;
    std::uint64_t sources = 0;
    for (const AccountedTensor& tensor : report.account.tensors) sources += tensor.sources.size();
    RANK_CHECK(sources == report.account.tensors_in);
    RANK_CHECK(report.account.dropped.empty());
  });
}

void check_same_files(const std::string& a, const std::string& b, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string name = "/" + shard_file_name(rank, ranks);
    CAPTURE(name);
    CHECK(test::read_text(a + name) == test::read_text(b + name));
  }
}

}  // namespace

TEST_CASE("each built-in plan, on 2, 3, 4 and 7 ranks, by both kinds of writers") {
  for (const Case& each : cases()) {
    CAPTURE(each.plan);
    const test::TemporaryDirectory work;
    inspect::write_demo_model(each.model, work / "model", 60'000);
    for (const int ranks : {2, 3, 4, 7}) {
      CAPTURE(ranks);
      const std::string shards = work / ("shards" + std::to_string(ranks));
      shard_model(work / "model", shards, each.plan, {.tensor = ranks});
      for (const Writers writers : {Writers::owners, Writers::first}) {
        export_by(ranks, shards, work / "out", each.plan,
                  {.force = true, .max_shard_size = 70'000, .memory_budget = 4 << 20, .writers = writers});
        test::check_equal(work / "model", work / "out");
      }
    }
  }
}

TEST_CASE("4 to 2, 2 to 8, 3 to 5: the shards are those that the model is cut into") {
  for (const Case& each : cases()) {
    CAPTURE(each.plan);
    const test::TemporaryDirectory work;
    inspect::write_demo_model(each.model, work / "model", 1 << 30);
    for (const auto& [from, to] : std::vector<std::pair<int, int>>{{4, 2}, {2, 8}, {3, 5}, {3, 1}}) {
      CAPTURE(from);
      const std::string name = std::to_string(from) + "to" + std::to_string(to);
      shard_model(work / "model", work / (name + "from"), each.plan, {.tensor = from});
      shard_model(work / "model", work / (name + "want"), each.plan, {.tensor = to});
      export_by(from, work / (name + "from"), work / name, each.plan, {.to = ParallelLayout{.tensor = to}});
      check_same_files(work / name, work / (name + "want"), to);
      export_by(2, work / name, work / "out", each.plan, {.force = true});
      test::check_equal(work / "model", work / "out");
    }
  }
}

TEST_CASE("tensor x pipeline x expert parallelism, there and back and across") {
  const test::TemporaryDirectory work;
  inspect::write_demo_model(test::mixtral(5, 6), work / "model", 1 << 30);
  const std::vector<std::string> layouts = {"tp=2,pp=2,ep=2", "tp=1,pp=3,ep=1", "tp=3,pp=1,ep=2", "tp=1,pp=2,ep=3",
                                            "4"};
  for (const std::string& layout : layouts)
    shard_model(work / "model", work / layout, "moe", ParallelLayout::parse(layout));
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    CAPTURE(layouts[i]);
    const int ranks = ParallelLayout::parse(layouts[i]).ranks();
    for (const Writers writers : {Writers::owners, Writers::first}) {
      export_by(ranks, work / layouts[i], work / "out", "auto",
                {.force = true, .memory_budget = 8 << 20, .writers = writers});
      test::check_equal(work / "model", work / "out");
    }
    const ParallelLayout to = ParallelLayout::parse(layouts[(i + 1) % layouts.size()]);
    export_by(3, work / layouts[i], work / "across", "moe", {.force = true, .to = to});
    check_same_files(work / "across", work / layouts[(i + 1) % layouts.size()], to.ranks());
  }
}

TEST_CASE("max, sum, stack, blocks, trim, rename and drop reach the file") {
  const test::TemporaryDirectory work;
  fs::create_directory(work / "shards");
  test::write_text(work / "shards/config.json", R"({"vocab_size": 5, "heads": 2})");
  test::write_text(work / "plan.json", R"({"muster_plan": 1, "rules": [
    {"match": "amax", "action": "max"}, {"match": "count", "action": "sum"}, {"match": "seen", "action": "stack"},
    {"match": "fused", "action": "concat", "dim": 0, "blocks": ["heads", 1]},
    {"match": "vocab", "action": "concat", "dim": 0, "trim": "vocab_size"},
    {"match": "old.*", "action": "same", "rename": "new.$1"}, {"match": "junk*", "action": "drop"}]})");
  for (int rank = 0; rank < 3; ++rank) {
    const auto tensor = [&](Shape shape, const std::vector<float>& values) {
      Tensor made = Tensor::allocate(DType::f32, std::move(shape));
      std::memcpy(made.mutable_data(), values.data(), made.nbytes());
      return made;
    };
    const auto r = static_cast<float>(rank);
    const std::vector<std::pair<std::string, Tensor>> tensors = {{"amax", tensor({2}, {r, -r})},
                                                                 {"count", tensor({2}, {r + 1, 10})},
                                                                 {"seen", tensor({}, {r})},
                                                                 {"fused", tensor({3}, {r, r + 10, r + 20})},
                                                                 {"vocab", tensor({2}, {2 * r, 2 * r + 1})},
                                                                 {"old.w", tensor({1}, {7})},
                                                                 {"junk" + std::to_string(rank), tensor({1}, {1})}};
    std::vector<TensorEntry> entries;
    for (const auto& [name, value] : tensors) entries.push_back({name, value.dtype(), value.shape()});
    SafetensorsWriter writer((work / "shards/") + shard_file_name(rank, 3), entries);
    for (const auto& [name, value] : tensors) writer.write(name, value);
    writer.commit();
  }
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    test::run_ranks(ranks, [&](SyncGroup& group) {
      const ExportReport report =
          export_model(work / "shards", work / "out", work / "plan.json", group, {.force = true});
      RANK_CHECK(group.rank() != 0 || report.account.dropped.size() == 3);
      RANK_CHECK(group.rank() != 0 || (report.account.tensors_in == 21 && report.account.tensors_out == 6));
    });
    const auto out = test::tensors_of(work / "out");
    REQUIRE(out.size() == 6);
    const auto values = [&](const std::string& name) {
      std::vector<float> all(out.at(name).nbytes() / sizeof(float));
      std::memcpy(all.data(), out.at(name).data(), out.at(name).nbytes());
      return all;
    };
    CHECK(values("amax") == std::vector<float>{2, 0});
    CHECK(values("count") == std::vector<float>{6, 30});
    CHECK(values("seen") == std::vector<float>{0, 1, 2});
    CHECK(out.at("seen").shape() == Shape{3});
    CHECK(values("fused") == std::vector<float>{0, 10, 1, 11, 2, 12, 20, 21, 22});
    CHECK(values("vocab") == std::vector<float>{0, 1, 2, 3, 4});
    CHECK(values("new.w") == std::vector<float>{7});
  }
}
