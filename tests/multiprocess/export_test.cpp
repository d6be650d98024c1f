// SPDX-License-Identifier: Apache-2.0
// Shard and export between real processes. The restored bytes are identical, whatever the number of ranks. Every
// failure ends the call on all ranks with an error, and leaves no file.

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "muster/export.hpp"
#include "muster/verify.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/models.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
namespace fs = std::filesystem;

namespace {

inspect::DemoModel tiny_llama() {
  return inspect::llama_model({.hidden = 48,
                               .intermediate = 100,
                               .layers = 2,
                               .heads = 12,
                               .key_value_heads = 4,
                               .vocabulary = 101,
                               .biases = true});
}

/// A model and its shards.
class ModelFolder : public test::TemporaryDirectory {
 public:
  ModelFolder() = default;
  explicit ModelFolder(int ranks) {
    inspect::write_demo_model(tiny_llama(), *this / "model", 1 << 30);
    shard_model(*this / "model", *this / "shards", {.tensor = ranks}, "llama");
  }
  [[nodiscard]] std::string shard(int rank, int ranks) const {
    return *this / "shards/" + shard_file_name(rank, ranks);
  }
  /// Exports the shards with `count` ranks, which must fail on all of them. Returns the error messages.
  std::vector<std::string> fail(int count, ErrorKind kind, const std::vector<std::string>& parts,
                                const std::string& plan = "llama", const std::string& out = "out") const {
    const auto ended = test::try_ranks(count, [&](Group& group) {
      const Error error =
          test::error_of(kind, parts, [&] { export_model(*this / "shards", *this / out, plan, group); });
      RANK_CHECK(!test::says(error, "\n"));
      group.barrier();  // the group is usable
      test::say(error.what());
    });
    test::check_ended(ended);
    std::vector<std::string> words;
    for (const test::Ended& rank : ended) words.push_back(rank.words);
    return words;
  }
};

}  // namespace

TEST_CASE("one file where all fits, and the same bytes every time, whichever ranks write") {
  const ModelFolder work(4);
  for (const std::string out : {"a", "b"}) {
    test::run_ranks(4, [&](Group& group) {
      export_model(work / "shards", work / out, "llama", group,
                   {.writers = out == "a" ? Writers::rank0 : Writers::all});
    });
  }
  CHECK(fs::exists(work / "a/model.safetensors"));
  CHECK_FALSE(fs::exists(work / "a/model.safetensors.index.json"));
  CHECK(test::read_text(work / "a/model.safetensors") == test::read_text(work / "b/model.safetensors"));
}

TEST_CASE(
    "one file and a root with a slow disk: no window is refilled too early, and each writer syncs its own bytes") {
  const test::TemporaryDirectory work;
  const inspect::DemoModel model = inspect::llama_model({.hidden = 192,
                                                         .intermediate = 500,
                                                         .layers = 3,
                                                         .heads = 12,
                                                         .key_value_heads = 4,
                                                         .vocabulary = 501,
                                                         .biases = true});
  inspect::write_demo_model(model, work / "model", 1 << 30);
  shard_model(work / "model", work / "shards", {.tensor = 4}, "llama");
  for (const Writers writers : {Writers::rank0, Writers::all}) {
    fs::remove_all(work / "out");
    test::run_ranks(4, [&](Group& group) {
      const auto sleeps = [] { std::this_thread::sleep_for(std::chrono::milliseconds(3)); };
      const test::FailingCall calls(
          {.path = "model.safetensors", .then = group.rank() == 0 ? sleeps : std::function<void()>()});
      const ExportReport report =
          export_model(work / "shards", work / "out", "llama", group, {.memory_budget = 1 << 20, .writers = writers});
      if (group.rank() == 0 && writers == Writers::rank0) RANK_CHECK(report.windows > 10);
      // No other rank can sync bytes that another host has not yet sent to the disk.
      bool has_unsynced = false;
      for (const std::string& call : test::FailingCall::calls())
        if (call == "pwrite" || call == "fsync") has_unsynced = call == "pwrite";
      RANK_CHECK(!has_unsynced);
    });
    test::check_equal(work / "model", work / "out");
  }
}

TEST_CASE("an export reports its progress while it writes, and all bytes at the end") {
  const ModelFolder work(2);
  std::atomic<int> reports = 0;
  Progress last;
  const test::FailingCall slow({.call = "pwrite", .path = "model.safetensors", .times = 1, .then = [&] {
                                  for (int turn = 0; turn < 10'000 && reports == 0; ++turn)
                                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                                }});
  export_model(work / "shards", work / "out", "llama", *single_group(), {.progress = [&](const Progress& progress) {
                 last = progress;
                 ++reports;
               }});
  CHECK(reports > 1);
  CHECK(last.total_bytes > 0);
  CHECK(last.bytes == last.total_bytes);
}

TEST_CASE("an output that exists is refused, and replaced with force") {
  const ModelFolder work(2);
  const std::string plan = "llama";
  CHECK_THROWS_WITH_AS(shard_model(work / "model", work / "shards", {.tensor = 3}, plan), doctest::Contains("--force"),
                       Error);
  CHECK(count_shards(work / "shards") == 2);
  shard_model(work / "model", work / "shards", {.tensor = 3}, plan, {.force = true});
  CHECK(count_shards(work / "shards") == 3);
  CHECK_THROWS_WITH_AS(shard_model(work / "model", work / "model", {.tensor = 3}, plan, {.force = true}),
                       doctest::Contains("is part of the source and cannot be the output"), Error);
  fs::create_directory(work / "home");
  std::ofstream(work / "home/letter.txt") << "dear";
  CHECK_THROWS_WITH_AS(shard_model(work / "model", work / "home", {.tensor = 3}, plan, {.force = true}),
                       doctest::Contains("not replaced"), Error);
  CHECK_THROWS_WITH_AS(shard_model(work / "model", work / "no/where", {.tensor = 3}, plan),
                       doctest::Contains("Make it first"), Error);

  work.fail(3, ErrorKind::invalid_argument, {"--force"}, "llama", "model");
  CHECK(test::names_in(work.path()) == std::vector<std::string>{"home", "model", "shards"});
}

TEST_CASE("a missing shard is named on every rank") {
  const ModelFolder work(4);
  fs::remove(work.shard(2, 4));
  work.fail(4, ErrorKind::not_found, {"rank-00002-of-00004"});
  CHECK(test::names_in(work.path()) == std::vector<std::string>{"model", "shards"});
}

TEST_CASE("any number of ranks exports any number of shards; mixed sets are refused") {
  const ModelFolder work(4);
  for (const int ranks : {1, 2, 3, 6}) {
    CAPTURE(ranks);
    test::run_ranks(
        ranks, [&](Group& group) { export_model(work / "shards", work / "out", "llama", group, {.force = true}); });
    test::check_equal(work / "model", work / "out");
  }
  fs::copy(work / "shards/rank-00000-of-00004.safetensors", work / "shards/rank-00000-of-00002.safetensors");
  CHECK_THROWS_WITH_AS(count_shards(work / "shards"), doctest::Contains("has sets of shards of 2 and of 4 ranks"),
                       Error);
  CHECK(count_shards(work / "model") == 1);
  CHECK_THROWS_WITH_AS(count_shards(work.path()), doctest::Contains("no shards (rank-"), Error);
}

TEST_CASE("Muster's shards need no plan, and report a different one") {
  const ModelFolder work;
  inspect::write_demo_model(tiny_llama(), work / "model", 1 << 30);
  test::write_text(work / "plan.json", std::string(R"({"muster_plan": 1, "comment": "mine", "rules": [
    {"match": "*{o_proj,down_proj}.weight", "action": "concat", "dim": 1}, {"match": "*norm.*", "action": "same"},
    {"match": "*o_proj.bias", "action": "same"}, {"match": "*", "action": "concat", "dim": 0}]})"));
  shard_model(work / "model", work / "shards", {.tensor = 2}, work / "plan.json");
  fs::remove(work / "plan.json");
  test::run_ranks(2, [&](Group& group) { export_model(work / "shards", work / "out", "", group); });
  test::check_equal(work / "model", work / "out");
  const ExportManifest other = plan_export(work / "shards", "llama");
  REQUIRE(other.notes.size() == 1);
  CHECK(other.notes[0].find("the shards record the plan \"") != std::string::npos);
  test::write_text(work / "again.json", std::string(R"({"rules": [
    {"action": "concat", "match": "*{o_proj,down_proj}.weight", "dim": 1}, {"match": "*norm.*", "action": "same"},
    {"match": "*o_proj.bias", "action": "same", "comment": "whole"}, {"match": "*", "action": "concat", "dim": 0}],
    "muster_plan": 1})"));
  for (const std::string& note : plan_export(work / "shards", work / "again.json").notes)
    CHECK(note.find("another plan") == std::string::npos);
  shard_model(work / "model", work / "two", {.tensor = 2}, "llama");
  CHECK(plan_export(work / "two", "auto").notes.empty());
  fs::copy(work / "two/rank-00001-of-00002.safetensors", work / "shards", fs::copy_options::overwrite_existing);
  work.fail(2, ErrorKind::rank_mismatch, {"have different plans"}, "", "no");
}

TEST_CASE("a flipped byte in a shard is an error that names file and tensor") {
  const ModelFolder work(3);
  const std::string victim = work.shard(1, 3);
  const auto shard = SafetensorsFile::open(victim);
  for (const TensorEntry& entry : shard.tensors()) {
    if (!entry.name.starts_with("model.layers.0.")) continue;
    CAPTURE(entry.name);
    test::flip_byte(victim, entry.offset + entry.bytes / 2);
    CHECK_THROWS_WITH_AS(
        export_model(work / "shards", work / "out", "", *single_group(), {.target_layout = ParallelLayout{4}}),
        doctest::Contains((entry.name + "\": checksum mismatch").c_str()), Error);
    const VerifyReport report = verify(work / "shards");
    REQUIRE(report.problems.size() == 1);
    CHECK(report.problems[0].tensor == entry.name);
    CHECK(report.problems[0].defect == Defect::checksum);
    test::flip_byte(victim, entry.offset + entry.bytes / 2);
  }
  const TensorEntry& last = shard.tensors().back();
  test::flip_byte(victim, last.offset);
  work.fail(3, ErrorKind::corrupt, {victim, "\"" + last.name + "\": checksum mismatch"}, "");
  CHECK(test::names_in(work.path()) == std::vector<std::string>{"model", "shards"});
}

TEST_CASE("invalid checksums are refused, and those of a later version are ignored") {
  const ModelFolder work;
  for (const auto& [text, is_good] : std::vector<std::pair<std::string, bool>>{
           {"{", false},
           {R"({"version": 1})", false},
           {R"({"version": 1, "algorithm": "xxh3-64", "piece": 1048576, "tensors": {"model.norm.weight": "12"}})",
            false},
           {R"({"version": 2, "algorithm": "xxh3-64", "piece": 1048576, "tensors": {}})", true}}) {
    CAPTURE(text);
    fs::remove_all(work / "shards");
    fs::create_directory(work / "shards");
    test::write_tensors(work.shard(0, 1), {{"model.norm.weight", test::pattern(DType::f32, {2}, 1)}},
                        {{"muster.checksums", text}});
    const auto call = [&] { export_model(work / "shards", work / "out", "llama", *single_group(), {.force = true}); };
    if (is_good)
      CHECK_NOTHROW(call());
    else
      CHECK_THROWS_WITH_AS(call(), doctest::Contains("malformed metadata \"muster.checksums\""), Error);
  }
}

TEST_CASE("a truncated shard is an error on every rank, with its rank") {
  const ModelFolder work(4);
  const std::string victim = work.shard(3, 4);
  fs::resize_file(victim, fs::file_size(victim) / 2);
  const auto words = work.fail(4, ErrorKind::corrupt, {"rank-00003-of-00004.safetensors"});
  CHECK(words[0].starts_with("rank 3: "));
  CHECK(test::names_in(work.path()) == std::vector<std::string>{"model", "shards"});
}

TEST_CASE("shards that were swapped are detected by their metadata") {
  const ModelFolder work(2);
  fs::rename(work.shard(0, 2), work / "shards/x");
  fs::rename(work.shard(1, 2), work.shard(0, 2));
  fs::rename(work / "shards/x", work.shard(1, 2));
  work.fail(2, ErrorKind::corrupt, {"rank 1 of 2"});
}

TEST_CASE("a plan that does not match is an error on every rank") {
  const ModelFolder work;
  inspect::write_demo_model(tiny_llama(), work / "model", 1 << 30);
  CHECK_THROWS_WITH_AS(shard_model(work / "model", work / "shards", {.tensor = 2}, "bert"),
                       doctest::Contains("no rule matches"), Error);
  CHECK(test::names_in(work.path()) == std::vector<std::string>{"model"});
  shard_model(work / "model", work / "shards", {.tensor = 2}, "llama");
  work.fail(2, ErrorKind::invalid_argument, {"no rule matches"}, "bert");
  work.fail(2, ErrorKind::not_found, {"built-in plans"}, "nothing.json");
  std::ofstream(work / "plan.json") << R"({"muster_plan": 1, "rules": [
    {"match": "{model.embed_tokens,lm_head}.weight", "action": "concat", "dim": 0}, {"match": "*", "action": "same"}]})";
  // A slice does not have the shape that config.json gives the matrix. Without config.json the slices differ, and
  // "same" names tensor and ranks.
  work.fail(2, ErrorKind::invalid_argument, {"contradicts its config.json"}, work / "plan.json");
  fs::remove(work / "shards/config.json");
  work.fail(2, ErrorKind::rank_mismatch, {"rank 0 and rank 1 have different values"}, work / "plan.json");
  fs::remove(work / "plan.json");
  std::ofstream(work / "plan.json") << R"({"muster_plan": 1, "rules": [{"match": "*", "action": "same"}]})";
  work.fail(2, ErrorKind::invalid_argument, {"the shards split it along dimension 0"}, work / "plan.json");
  CHECK(test::names_in(work.path()) == std::vector<std::string>{"model", "plan.json", "shards"});
}

TEST_CASE("ranks whose shapes do not match the plan are named") {
  const ModelFolder work;
  fs::create_directory(work / "shards");
  for (int rank = 0; rank < 2; ++rank)
    test::write_tensors(work.shard(rank, 2), {{"model.norm.weight", test::pattern(DType::f32, {2, 3 + rank}, 1)}});
  work.fail(2, ErrorKind::rank_mismatch, {"rank 0 has F32 [2, 3], rank 1 has F32 [2, 4]"});
  CHECK(test::names_in(work.path()) == std::vector<std::string>{"shards"});
}

TEST_CASE("shards from elsewhere, without metadata and of unequal sizes, are joined") {
  const ModelFolder work;
  fs::create_directory(work / "shards");
  for (int rank = 0; rank < 3; ++rank) {
    Tensor tensor = Tensor::allocate(DType::u8, {4, 1 + rank});
    std::fill_n(tensor.mutable_data(), tensor.nbytes(), static_cast<std::byte>(rank));
    test::write_tensors(work.shard(rank, 3), {{"x.mlp.down_proj.weight", tensor}});
  }
  test::run_ranks(3, [&](Group& group) { export_model(work / "shards", work / "out", "llama", group); });
  const Tensor merged = test::tensors_of(work / "out").at("x.mlp.down_proj.weight");
  REQUIRE(merged.shape() == Shape{4, 6});
  const std::vector<int> row = {0, 1, 1, 2, 2, 2};
  for (std::size_t i = 0; i < 24; ++i) CHECK(static_cast<int>(merged.bytes()[i]) == row[i % 6]);
}
