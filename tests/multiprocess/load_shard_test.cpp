// SPDX-License-Identifier: Apache-2.0
// Ranks that load their parts of a checkpoint together. Each gets its shard, and each host reads each byte of the model
// once.

#include "muster/load_shard.hpp"

#include <doctest/doctest.h>

#include <csignal>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "muster/export.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/models.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;

namespace {

std::uint64_t sum_of(Group& group, std::uint64_t mine) {
  std::vector<std::uint64_t> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return std::accumulate(all.begin(), all.end(), std::uint64_t{0});
}

void check_shard(const std::vector<NamedTensor>& tensors, const std::string& path) {
  const SafetensorsFile shard = SafetensorsFile::open(path);
  RANK_CHECK(tensors.size() == shard.tensors().size());
  for (const auto& [name, tensor] : tensors)
    if (!shard.find(name) || !bitwise_equal(tensor, shard.tensor(name))) throw test::RankFailure("tensor " + name);
}

inspect::DemoModel some_llama() {
  return inspect::llama_model({.hidden = 512,
                               .intermediate = 1536,
                               .layers = 3,
                               .heads = 8,
                               .key_value_heads = 4,
                               .vocabulary = 8000,
                               .biases = true});
}

}  // namespace

TEST_CASE("ranks of a group get their shards, and read each byte of the model once") {
  struct Case {
    inspect::DemoModel model;
    const char* plan;
    const char* layout;
    std::vector<int> parts;  // rank numbers of the group
  };
  const std::vector<Case> cases = {
      {some_llama(), "llama", "4", {0, 1, 2, 3}},
      {some_llama(), "llama", "tp=2,pp=2", {3, 2, 1, 0}},
      {some_llama(), "llama", "8", {7, 0, 3}},
      {some_llama(), "megatron", "2", {0, 1, 1, 0}},
      {some_llama(), "vllm", "tp=2,pp=2", {0, 1, 2, 3}},
      {some_llama(), "llama", "2", {1}},
      {test::mixtral(), "moe", "tp=2,pp=1,ep=2", {0, 1, 2, 3}},
      {test::llama(), "llama", "7", {0, 6, 3}},
      {test::gpt_neox(), "gpt-neox", "2", {0, 1}},
  };
  for (const Case& each : cases) {
    CAPTURE(each.plan);
    CAPTURE(each.layout);
    const test::TemporaryDirectory work{test::Medium::memory};
    const std::uint64_t bytes = inspect::write_demo_model(each.model, work / "model", 1 << 24);
    const ParallelLayout layout = ParallelLayout::parse(each.layout);
    shard_model(work / "model", work / "shards", layout, each.plan);
    test::run_ranks(static_cast<int>(each.parts.size()), [&](Group& group) {
      const int part = each.parts[static_cast<std::size_t>(group.rank())];
      const std::uint64_t before = test::bytes_read();
      std::uint64_t told = 0;
      const std::vector<NamedTensor> tensors =
          load_shard(work / "model", layout, part, each.plan, group,
                     {.progress = [&](const Progress& progress) { told = progress.bytes; }});
      const std::uint64_t read = sum_of(group, test::bytes_read() - before);
      check_shard(tensors, (work / "shards/") + shard_file_name(part, layout.ranks()));
      RANK_CHECK(told != 0);
      constexpr std::uint64_t of_headers = 256 << 10;
      if (read > bytes + of_headers * each.parts.size())
        throw test::RankFailure("read " + std::to_string(read) + " of " + std::to_string(bytes));
    });
  }
}

TEST_CASE("shards, states and files of ranks are loaded for another layout") {
  const test::TemporaryDirectory work{test::Medium::memory};
  const std::uint64_t bytes = inspect::write_demo_model(some_llama(), work / "model", 1 << 24);
  shard_model(work / "model", work / "want", {.tensor = 3}, "llama");
  shard_model(work / "model", work / "two", {.tensor = 2}, "llama");
  shard_model(work / "model", work / "states", {.tensor = 2}, "llama", {.to_workspace = true});
  std::filesystem::create_directory(work / "ranks");
  std::filesystem::copy(work / "two/config.json", work / "ranks/config.json");
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<NamedTensor> tensors;
    const auto shard = SafetensorsFile::open((work / "two/") + shard_file_name(rank, 2));
    for (const TensorEntry& entry : shard.tensors()) tensors.emplace_back(entry.name, shard.tensor(entry.name));
    test::write_tensors(work / ("ranks/part" + std::to_string(rank) + ".safetensors"), tensors);
  }
  // Shards of two different jobs are not joined.
  shard_model(work / "model", work / "others", {.tensor = 2}, "llama", {.to_workspace = true});
  test::run_ranks(2, [&](Group& group) {
    test::error_of(ErrorKind::rank_mismatch, {"passed different models"},
                   [&] { load_shard(work / (group.rank() == 0 ? "states" : "others"), {.tensor = 3}, 0, "", group); });
  });
  struct Case {
    const char* source;
    const char* plan;
    LoadShardOptions options;
  };
  for (const Case& each : {Case{"two", "", {}}, Case{"states", "", {}}, Case{"model", "auto", {}},
                           Case{"ranks", "llama", {.file_pattern = "part{rank}.safetensors"}}}) {
    CAPTURE(each.source);
    for (int rank = 0; rank < 3; ++rank)
      check_shard(load_shard(work / each.source, {.tensor = 3}, rank, each.plan, each.options),
                  (work / "want/") + shard_file_name(rank, 3));
    test::run_ranks(3, [&](Group& group) {
      const std::uint64_t before = test::bytes_read();
      const auto tensors = load_shard(work / each.source, {.tensor = 3}, group.rank(), each.plan, group, each.options);
      const std::uint64_t read = sum_of(group, test::bytes_read() - before);
      check_shard(tensors, (work / "want/") + shard_file_name(group.rank(), 3));
      // Each byte is read once. Replicated parts, and blocks that end inside a chunk with a checksum, are read once
      // more.
      if (read > bytes + bytes / 4) throw test::RankFailure("read " + std::to_string(read));
    });
  }
}

TEST_CASE("Megatron-Core saves, whole or in ranks, are loaded for another layout by a plan with Hugging Face names") {
  struct Case {
    std::string sample;
    const char* plan;
    ParallelLayout layout;
  };
  for (const Case& each : {Case{"dense", "auto", {2, 2, 1}}, Case{"mixture", "moe", {2, 1, 2}}}) {
    const std::string at = std::string(MUSTER_TEST_DATA "/megatron/") + each.sample;
    const test::TemporaryDirectory work{test::Medium::memory};
    shard_model(at + "/model", work / "want", each.layout, each.plan);
    test::error_of(ErrorKind::invalid_argument, {"--to-plan"},
                   [&] { load_shard(at + "/dist", each.layout, 0, "megatron", {.base_model = at + "/model"}); });
    for (const std::string source : {"/dist", "/ranks"}) {
      CAPTURE(at + source);
      const LoadShardOptions options{.base_model = at + "/model", .to_plan = each.plan};
      shard_model(at + source, work / ("cut" + source.substr(1)), each.layout, "megatron",
                  {.base_model = options.base_model, .to_plan = options.to_plan});
      for (int rank = 0; rank < 4; ++rank) {
        const std::string name = "/" + shard_file_name(rank, 4);
        const auto tensors = load_shard(at + source, each.layout, rank, "megatron", options);
        check_shard(tensors, (work / "want") + name);
        check_shard(tensors, (work / ("cut" + source.substr(1))) + name);
      }
      test::run_ranks(4, [&](Group& group) {
        check_shard(load_shard(at + source, each.layout, group.rank(), "megatron", group, options),
                    (work / "want/") + shard_file_name(group.rank(), 4));
      });
      CHECK(std::filesystem::exists(work / ("cut" + source.substr(1)) + "/config.json"));
    }
  }
}

TEST_CASE("a failure of one rank to load is an error on every rank, and the group remains usable") {
  const test::TemporaryDirectory work{test::Medium::memory};
  inspect::write_demo_model(some_llama(), work / "model", 1 << 24);
  inspect::write_demo_model(test::llama(), work / "other", 1 << 24);
  struct Case {
    const char* model;
    const char* plan;
    int part;  // the part that rank 1 requests
    ErrorKind kind;
    const char* words;
  };
  const std::vector<Case> cases = {
      {"nowhere", "llama", 1, ErrorKind::not_found, "nowhere"},
      {"model", "llama", 3, ErrorKind::invalid_argument, "(valid: 0 to 2)"},
      {"other", "llama", 1, ErrorKind::rank_mismatch, "passed different models"},
      {"model", "vllm", 1, ErrorKind::rank_mismatch, "passed different models, plans or layouts"},
  };
  test::run_ranks(3, [&](Group& group) {
    const bool is_odd = group.rank() == 1;
    for (const Case& each : cases) {
      const Error error = test::error_of(each.kind, {each.words}, [&] {
        load_shard(work / (is_odd ? each.model : "model"), {.tensor = 3}, is_odd ? each.part : 0,
                   is_odd ? each.plan : "llama", group);
      });
      RANK_CHECK(error.details().rank == 1);
    }
    RANK_CHECK(load_shard(work / "model", {.tensor = 3}, 0, "llama", group).size() > 10);
    std::stop_source stop;
    if (is_odd) stop.request_stop();
    test::error_of(ErrorKind::cancelled, {},
                   [&] { load_shard(work / "model", {.tensor = 3}, 0, "llama", group, {.stop = stop.get_token()}); });
  });
}

TEST_CASE("a rank that dies or stops while it loads is named by the others") {
  const test::TemporaryDirectory work{test::Medium::memory};
  inspect::write_demo_model(some_llama(), work / "model", 1 << 24);
  for (const int signal : {SIGKILL, SIGSTOP}) {
    CAPTURE(signal);
    const auto ended = test::try_losing(2, signal, 3, [&](Group& group) {
      const auto end = [&](const Progress& progress) {
        if (group.rank() == 2 && progress.bytes > (4 << 20)) std::raise(signal);
      };
      const Error error = test::error_of(
          signal == SIGKILL ? ErrorKind::peer_lost : ErrorKind::timeout, {"rank 2"},
          [&] { load_shard(work / "model", {.tensor = 3}, group.rank(), "llama", group, {.progress = end}); });
      RANK_CHECK(error.rank() == 2);
    });
    test::check_ended(ended, {2});
  }
}
