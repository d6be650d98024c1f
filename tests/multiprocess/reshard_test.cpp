// SPDX-License-Identifier: Apache-2.0
// Every built-in plan with every way to cut a model. The model is cut for ranks and joined again, or cut for another
// layout without a checkpoint in between. The result is identical, bit for bit.

#include <cstring>

#include "muster/export.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/models.hpp"

using namespace muster;
namespace fs = std::filesystem;

namespace {

struct Case {
  const char* plan;
  inspect::DemoModel model;
};

std::vector<Case> cases() {
  return {{"llama", test::llama()}, {"auto", test::llama(true)}, {"gpt-neox", test::gpt_neox()},
          {"bert", test::bert()},   {"bert", test::bert({})},    {"moe", test::mixtral()}};
}

constexpr std::uint64_t small_file = 50'000;

void export_by(int ranks, const std::string& shards, const std::string& out, const std::string& plan,
               const ExportOptions& options) {
  test::run_ranks(ranks, [&](Group& group) {
    const ExportReport report = export_model(shards, out, plan, group, options);
    if (group.rank() != 0) return;
    std::uint64_t sources = 0;
    for (const TensorMapping& tensor : report.manifest.tensors) sources += tensor.sources.size();
    RANK_CHECK(sources == report.manifest.tensors_in);
    RANK_CHECK(report.manifest.dropped.empty());
    // Files are small and several ranks have parts of one, so all of these are needed.
    if (options.max_shard_size == small_file) {
      RANK_CHECK(report.manifest.tensors_out == test::tensors_of(out).size());
      RANK_CHECK(report.manifest.files > 1);
      RANK_CHECK((ranks == 1 || report.windows > 1));
    }
  });
}

// A model with 8 heads of size 8 and 2 key-value heads. With `fused` the projections are fused as in Phi-3. There are
// two kinds of scales: one per row, as in engine checkpoints with a config.json, and one per block.
inspect::DemoModel grouped_heads(bool fused) {
  inspect::DemoModel model = inspect::llama_model({.hidden = 64,
                                                   .intermediate = 128,
                                                   .layers = 2,
                                                   .heads = 8,
                                                   .key_value_heads = 2,
                                                   .vocabulary = 96,
                                                   .biases = !fused});
  if (fused)
    for (TensorEntry& part : model.tensors)
      if (const std::size_t at = part.name.find("q_proj.weight"); at != std::string::npos)
        part = {part.name.substr(0, at) + "qkv_proj.weight", part.dtype, {96, 64}};
  if (fused)
    std::erase_if(model.tensors, [](const auto& part) {
      return part.name.ends_with(".k_proj.weight") || part.name.ends_with(".v_proj.weight");
    });
  if (!fused) {
    model.tensors.push_back({"model.layers.0.self_attn.k_proj.weight_scale", DType::f32, {16, 1}});
    model.tensors.push_back({"model.layers.0.mlp.up_proj.weight_scale_inv", DType::f32, {8, 4}});
    model.tensors.push_back({"model.layers.0.mlp.down_proj.weight_scale_inv", DType::f32, {4, 8}});
  }
  return model;
}

Tensor rows_of(const Tensor& whole, const std::vector<std::pair<std::int64_t, std::int64_t>>& ranges) {
  Shape shape = whole.shape();
  shape[0] = 0;
  for (const auto& [begin, end] : ranges) shape[0] += end - begin;
  Tensor part = Tensor::allocate(whole.dtype(), shape);
  const std::size_t row = whole.nbytes() / static_cast<std::size_t>(whole.shape()[0]);
  std::byte* to = part.mutable_data();
  for (const auto& [begin, end] : ranges) {
    const std::size_t bytes = static_cast<std::size_t>(end - begin) * row;
    std::memcpy(to, whole.data() + static_cast<std::size_t>(begin) * row, bytes);
    to += bytes;
  }
  return part;
}

Tensor columns_of(const Tensor& whole, std::int64_t part, std::int64_t parts) {
  const std::int64_t width = whole.shape()[1] / parts;
  Tensor cut = Tensor::allocate(whole.dtype(), {whole.shape()[0], width});
  const std::size_t item = whole.nbytes() / static_cast<std::size_t>(element_count(whole.shape()));
  const std::size_t bytes = static_cast<std::size_t>(width) * item;
  for (std::int64_t row = 0; row < whole.shape()[0]; ++row)
    std::memcpy(cut.mutable_data() + static_cast<std::size_t>(row) * bytes,
                whole.data() + (static_cast<std::size_t>(row * parts + part)) * bytes, bytes);
  return cut;
}

// Returns the part of a tensor on rank `rank` of 8, as vLLM and TensorRT-LLM load it: one query head per rank, each
// key-value head on four neighbouring ranks.
Tensor as_engines_cut(const std::string& name, const Tensor& whole, std::int64_t rank) {
  const auto is = [&](const char* part) { return name.find(part) != std::string::npos; };
  const std::int64_t rows = whole.shape()[0];
  const std::int64_t key = rank / 4;
  if (is("qkv_proj"))
    return rows_of(whole, {{8 * rank, 8 * rank + 8}, {64 + 8 * key, 72 + 8 * key}, {80 + 8 * key, 88 + 8 * key}});
  if (is("k_proj") || is("v_proj")) return rows_of(whole, {{key * rows / 2, (key + 1) * rows / 2}});
  if (is("o_proj") || is("down_proj")) return columns_of(whole, rank, 8);
  if (is("norm")) return whole;
  return rows_of(whole, {{rank * rows / 8, (rank + 1) * rows / 8}});
}

void write_as_engines_cut(const std::string& model, const std::string& shards) {
  fs::create_directory(shards);
  fs::copy(model + "/config.json", shards + "/config.json");
  for (int rank = 0; rank < 8; ++rank) {
    std::vector<NamedTensor> parts;
    for (const auto& [name, whole] : test::tensors_of(model))
      parts.emplace_back(name, as_engines_cut(name, whole, rank));
    test::write_tensors(shards + "/" + shard_file_name(rank, 8), parts, {{"format", "pt"}});
  }
}

void check_same_files(const std::string& a, const std::string& b, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string name = "/" + shard_file_name(rank, ranks);
    CAPTURE(name);
    CHECK(test::read_text(a + name) == test::read_text(b + name));
  }
}

}  // namespace

TEST_CASE("each built-in plan, on 1, 2, 3, 4 and 7 ranks, by both kinds of writers") {
  for (const Case& each : cases()) {
    CAPTURE(each.plan);
    const test::TemporaryDirectory work{test::Medium::memory};
    inspect::write_demo_model(each.model, work / "model", 60'000);
    fs::create_directory(work / "model/1_Pooling");
    test::write_text(work / "model/1_Pooling/config.json", "{}");
    for (const int ranks : {1, 2, 3, 4, 7}) {
      CAPTURE(ranks);
      const std::string shards = work / ("shards" + std::to_string(ranks));
      shard_model(work / "model", shards, {.tensor = ranks}, each.plan);
      CHECK(count_shards(shards) == ranks);
      for (const Writers writers : {Writers::all, Writers::rank0}) {
        export_by(ranks, shards, work / "out", each.plan,
                  {.force = true, .max_shard_size = small_file, .memory_budget = 4 << 20, .writers = writers});
        test::check_equal(work / "model", work / "out");
      }
      CHECK(fs::exists(work / "out/1_Pooling/config.json"));
      CHECK(fs::exists(work / "out/model.safetensors.index.json"));
    }
    CHECK(test::names_in(work.path()).size() == 7);  // no tensor is partial
  }
}

TEST_CASE("4 to 2, 2 to 6, 3 to 5: the shards equal those cut from the model") {
  for (const Case& each : cases()) {
    CAPTURE(each.plan);
    const test::TemporaryDirectory work{test::Medium::memory};
    inspect::write_demo_model(each.model, work / "model", 1 << 30);
    for (const auto& [from, to] : std::vector<std::pair<int, int>>{{4, 2}, {2, 6}, {3, 5}, {3, 1}}) {
      CAPTURE(from);
      const std::string name = std::to_string(from) + "to" + std::to_string(to);
      shard_model(work / "model", work / (name + "from"), {.tensor = from}, each.plan);
      shard_model(work / "model", work / (name + "want"), {.tensor = to}, each.plan);
      export_by(from, work / (name + "from"), work / name, each.plan, {.target_layout = ParallelLayout{.tensor = to}});
      check_same_files(work / name, work / (name + "want"), to);
      export_by(2, work / name, work / "out", each.plan, {.force = true});
      test::check_equal(work / "model", work / "out");
    }
  }
}

TEST_CASE("a model, or shards, are cut for files with every byte read about once") {
  const test::TemporaryDirectory work{test::Medium::memory};
  // Rows end inside chunks that have a checksum, and matrices have many chunks.
  inspect::write_demo_model(
      inspect::llama_model(
          {.hidden = 600, .intermediate = 5000, .layers = 2, .heads = 12, .key_value_heads = 12, .vocabulary = 3000}),
      work / "model", 1 << 30);
  const std::uint64_t bytes = fs::file_size(work / "model/model.safetensors");
  shard_model(work / "model", work / "four", {.tensor = 4}, "llama");
  struct Case {
    const char* from;
    const char* plan;
    const char* to_plan;
    const char* layout;
  };
  for (const Case& each :
       {Case{"model", "llama", "", "8"}, Case{"model", "llama", "", "tp=3,pp=2"}, Case{"model", "vllm", "", "6"},
        Case{"four", "llama", "llama", "8"}, Case{"four", "llama", "llama", "3"}, Case{"four", "llama", "vllm", "6"}}) {
    CAPTURE(each.from);
    CAPTURE(each.plan);
    CAPTURE(each.layout);
    const ParallelLayout layout = ParallelLayout::parse(each.layout);
    const std::uint64_t before = test::bytes_read();
    shard_model(work / each.from, work / "out", layout, each.plan, {.force = true, .to_plan = each.to_plan});
    const std::uint64_t read = test::bytes_read() - before;
    CHECK(read >= bytes);
    // Threads that a busy machine delays are further apart, and some chunks between them are read again.
    CHECK(read < bytes + bytes / 3);
    if (std::string(each.from) == "model") continue;
    shard_model(work / "model", work / "want", layout, each.to_plan, {.force = true});
    check_same_files(work / "out", work / "want", layout.ranks());
  }
}

TEST_CASE("a model with 2 key-value heads on 8 ranks, which engines replicate, is restored") {
  for (const bool fused : {false, true}) {
    CAPTURE(fused);
    const test::TemporaryDirectory work{test::Medium::memory};
    inspect::write_demo_model(grouped_heads(fused), work / "model", 1 << 30);
    write_as_engines_cut(work / "model", work / "engine");
    const ShardReport report = shard_model(work / "model", work / "ours", {.tensor = 8}, "auto");
    REQUIRE(report.notes.size() == 1);
    CHECK(report.notes[0].find("neighbouring ranks have copies of one head") != std::string::npos);
    for (int rank = 0; rank < 8; ++rank) {
      const auto ours = SafetensorsFile::open((work / "ours/") + shard_file_name(rank, 8));
      // Version 0.1.0 refuses version 2. Without it, 0.1.0 would join the heads one after the other.
      CHECK(ours.metadata().at("muster.shard").starts_with(R"({"version":2,)"));
      const auto engine = SafetensorsFile::open((work / "engine/") + shard_file_name(rank, 8));
      for (const TensorEntry& entry : engine.tensors()) {
        CAPTURE(entry.name);
        CHECK(bitwise_equal(ours.tensor(entry.name), engine.tensor(entry.name)));
      }
    }
    for (const std::string shards : {"engine", "ours"}) {
      for (const int ranks : {1, 3, 8}) {
        const std::string plan = shards == "ours" ? "" : "llama";
        export_by(ranks, work / shards, work / "out", plan, {.force = true, .memory_budget = 8 << 20});
        test::check_equal(work / "model", work / "out");
      }
      shard_model(work / "model", work / "four", {.tensor = 4}, "llama", {.force = true});
      export_by(2, work / shards, work / "across", "llama",
                {.force = true, .target_layout = ParallelLayout{.tensor = 4}});
      check_same_files(work / "across", work / "four", 4);
    }
  }
}

TEST_CASE("replicated heads that differ are an error that names the tensor and the ranks") {
  const test::TemporaryDirectory work{test::Medium::memory};
  inspect::write_demo_model(grouped_heads(true), work / "model", 1 << 30);
  write_as_engines_cut(work / "model", work / "shards");
  const std::string name = "model.layers.1.self_attn.qkv_proj.weight";
  const std::string path = (work / "shards/") + shard_file_name(6, 8);
  std::uint64_t offset = 0;
  const auto shard = SafetensorsFile::open(path);
  for (const TensorEntry& entry : shard.tensors())
    if (entry.name == name) offset = entry.offset + entry.bytes - 1;  // in the value head
  test::flip_byte(path, offset);
  CHECK_THROWS_WITH_AS(export_model(work / "shards", work / "out", "llama", *single_group()),
                       doctest::Contains((name + "\": rank 4 and rank 6 have different values").c_str()), Error);
  CHECK_FALSE(fs::exists(work / "out"));
}

TEST_CASE("a checkpoint that does not fit its config.json is refused before a byte is written") {
  struct Case {
    const char* from;
    const char* to;
    const char* words;
  };
  for (const Case& each :
       {Case{R"("num_key_value_heads": 2)", R"("num_key_value_heads": 4, "head_dim": 8)",
             "k_proj.weight\" is BF16 [16, 64], but dimension 0 must be 32 (\"num_key_value_heads\" 4 x \"head_dim\" "
             "8)"},
        Case{R"("hidden_size": 64)", R"("hidden_size": 32)", "\"hidden_size\" 32"},
        Case{R"("intermediate_size": 128)", R"("intermediate_size": 120)", "\"intermediate_size\" 120"},
        Case{R"("vocab_size": 96)", R"("vocab_size": 97)", "\"vocab_size\" 97"},
        Case{R"("num_hidden_layers": 2)", R"("num_hidden_layers": 3)", "no tensor belongs to layer 2"}}) {
    CAPTURE(each.to);
    const test::TemporaryDirectory work{test::Medium::memory};
    inspect::write_demo_model(grouped_heads(false), work / "model", 1 << 30);
    shard_model(work / "model", work / "shards", {.tensor = 2}, "llama");
    std::string config = test::read_text(work / "shards/config.json");
    config.replace(config.find(each.from), std::string(each.from).size(), each.to);
    test::write_text(work / "shards/config.json", config);
    CHECK_THROWS_WITH_AS(export_model(work / "shards", work / "out", "", *single_group()),
                         doctest::Contains(each.words), Error);
    CHECK_FALSE(fs::exists(work / "out"));
    ExportOptions options;
    options.base_model = work / "shards";
    CHECK_THROWS_WITH_AS(export_model(work / "model", work / "out", "", *single_group(), options),
                         doctest::Contains(each.words), Error);
    CHECK_FALSE(fs::exists(work / "out"));
    // A config.json without these values is not an error, and neither is a padded vocabulary.
    test::write_text(work / "shards/config.json", R"({"vocab_size": 90})");
    CHECK_NOTHROW(export_model(work / "shards", work / "out", "", *single_group()));
  }
}

TEST_CASE("tensor x pipeline x expert parallelism, there and back and across") {
  const test::TemporaryDirectory work{test::Medium::memory};
  inspect::write_demo_model(test::mixtral(5, 6), work / "model", 1 << 30);
  const std::vector<std::string> layouts = {"tp=2,pp=2,ep=2", "tp=1,pp=3,ep=1", "tp=3,pp=1,ep=2", "tp=1,pp=2,ep=3",
                                            "4"};
  for (const std::string& layout : layouts)
    shard_model(work / "model", work / layout, ParallelLayout::parse(layout), "moe");
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    CAPTURE(layouts[i]);
    const int ranks = ParallelLayout::parse(layouts[i]).ranks();
    for (const Writers writers : {Writers::all, Writers::rank0}) {
      export_by(ranks, work / layouts[i], work / "out", "auto",
                {.force = true, .memory_budget = 8 << 20, .writers = writers});
      test::check_equal(work / "model", work / "out");
    }
    const ParallelLayout to = ParallelLayout::parse(layouts[(i + 1) % layouts.size()]);
    export_by(3, work / layouts[i], work / "across", "moe", {.force = true, .target_layout = to});
    check_same_files(work / "across", work / layouts[(i + 1) % layouts.size()], to.ranks());
  }
}

TEST_CASE("max, sum, stack, blocks, trim, rename and drop are applied in the written file") {
  const test::TemporaryDirectory work{test::Medium::memory};
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
    const std::vector<NamedTensor> tensors = {{"amax", tensor({2}, {r, -r})},
                                              {"count", tensor({2}, {r + 1, 10})},
                                              {"seen", tensor({}, {r})},
                                              {"fused", tensor({3}, {r, r + 10, r + 20})},
                                              {"vocab", tensor({2}, {2 * r, 2 * r + 1})},
                                              {"old.w", tensor({1}, {7})},
                                              {"junk" + std::to_string(rank), tensor({1}, {1})}};
    test::write_tensors((work / "shards/") + shard_file_name(rank, 3), tensors);
  }
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    test::run_ranks(ranks, [&](Group& group) {
      const ExportReport report =
          export_model(work / "shards", work / "out", work / "plan.json", group, {.force = true});
      RANK_CHECK(group.rank() != 0 || report.manifest.dropped.size() == 3);
      RANK_CHECK(group.rank() != 0 || (report.manifest.tensors_in == 21 && report.manifest.tensors_out == 6));
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
