// SPDX-License-Identifier: Apache-2.0
// Rank files of other programs become a model in the Hugging Face layout, and back.

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/load_shard.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"
#include "tests/unit/plan_samples.hpp"

using namespace muster;
using namespace muster::test::samples;
using test::has;
using test::TemporaryDirectory;
using test::words_of;

namespace {

struct Sample {
  std::string plan;
  std::string layout;
  Files (*files)(const Model&, const ParallelLayout&, bool);
  bool of_experts = false;
  Model (*turned)(Model) = nullptr;  // of the model
};

void check_shard(const std::string& file, const std::vector<NamedTensor>& tensors) {
  const SafetensorsFile shard = SafetensorsFile::open(file);
  REQUIRE(tensors.size() == shard.tensors().size());
  for (const auto& [name, tensor] : tensors) {
    CAPTURE(name);
    REQUIRE(shard.find(name));
    CHECK(bitwise_equal(tensor, shard.tensor(name)));
  }
}

}  // namespace

TEST_CASE("ranks of other programs become a Hugging Face model, and the inverse") {
  const std::vector<Sample> samples = {
      {"megatron", "1", megatron},
      {"megatron", "2", megatron},
      {"megatron", "tp=4,pp=2", megatron},
      {"megatron-moe", "tp=2,pp=2,ep=2", megatron, true},
      {"megatron-mixtral", "tp=2,pp=1,ep=2", megatron_mixtral, true, mixtral},
      {"megatron-gated", "tp=2,pp=2,ep=2", megatron, true, gated},
      {"megatron-mla", "tp=2,pp=2", megatron_latent, true, latent},
      {"vllm", "2", vllm},
      {"vllm", "8", vllm},
      {"trtllm", "tp=2,pp=2", trtllm},
      {"trtllm", "8", trtllm},
      {"meta", "1", meta},
      {"meta", "4", meta},
  };
  for (const Sample& sample : samples) {
    CAPTURE(sample.plan);
    CAPTURE(sample.layout);
    const TemporaryDirectory temporary;
    const std::string given = temporary.path().string() + "/model";
    const std::string shards = temporary.path().string() + "/shards";
    write_config(given);
    write_config(shards);
    Model whole = model(sample.of_experts);
    if (sample.files == meta) erase_biases(whole);
    if (sample.turned != nullptr) whole = sample.turned(std::move(whole));
    write_model(whole, given + "/model.safetensors");
    const ParallelLayout layout = ParallelLayout::parse(sample.layout);
    const Files files = sample.files(whole, layout, sample.of_experts);
    for (int rank = 0; rank < layout.ranks(); ++rank)
      write_model(files[static_cast<std::size_t>(rank)], shards + "/" + shard_file_name(rank, layout.ranks()));

    ExportOptions options;
    options.source_layout = layout;
    export_model(shards, temporary.path().string() + "/out", sample.plan, *single_group(), options);
    test::check_equal(given, temporary.path().string() + "/out");

    shard_model(given, temporary.path().string() + "/cut", layout, sample.plan);
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      CAPTURE(rank);
      const std::string name = "/" + shard_file_name(rank, layout.ranks());
      const SafetensorsFile wanted = SafetensorsFile::open(shards + name);
      const SafetensorsFile cut = SafetensorsFile::open(temporary.path().string() + "/cut" + name);
      std::map<std::string, std::size_t> places;
      for (std::size_t i = 0; i < cut.tensors().size(); ++i) places[cut.tensors()[i].name] = i;
      CHECK(places.size() == wanted.tensors().size());
      for (std::size_t i = 0; i < wanted.tensors().size(); ++i) {
        const std::string& tensor = wanted.tensors()[i].name;
        CAPTURE(tensor);
        REQUIRE(places.contains(tensor));
        CHECK(bitwise_equal(wanted.tensor(i), cut.tensor(places.at(tensor))));
      }
      for (const auto& [tensor, loaded] : load_shard(given, layout, rank, sample.plan))
        CHECK(bitwise_equal(loaded, cut.tensor(places.at(tensor))));
    }
    // Cuts the ranks for another layout by a plan with Hugging Face names. Each part is read directly from the given
    // ranks.
    const ParallelLayout two = ParallelLayout::parse(sample.of_experts ? "tp=2,pp=1,ep=2" : "tp=2,pp=2");
    const std::string plan = sample.of_experts ? "moe" : "llama";
    shard_model(given, temporary.path().string() + "/want", two, plan);
    const std::string named = sample.of_experts ? plan : "";  // config.json names llama, which is the choice of "auto"
    options.target_layout = two;
    options.to_plan = named;
    export_model(shards, temporary.path().string() + "/cut_anew", sample.plan, *single_group(), options);
    for (int rank = 0; rank < two.ranks(); ++rank) {
      const std::string name = "/" + shard_file_name(rank, two.ranks());
      const auto loaded = load_shard(shards, two, rank, sample.plan, {.source_layout = layout, .to_plan = named});
      check_shard(temporary.path().string() + "/want" + name, loaded);
      check_shard(temporary.path().string() + "/cut_anew" + name, loaded);
    }
    // Also by a plan with views, for another number of ranks of the same program.
    shard_model(given, temporary.path().string() + "/theirs", {.tensor = 2}, sample.plan);
    for (int rank = 0; rank < 2; ++rank)
      check_shard(
          temporary.path().string() + "/theirs/" + shard_file_name(rank, 2),
          load_shard(shards, {.tensor = 2}, rank, sample.plan, {.source_layout = layout, .to_plan = sample.plan}));
    // Cut and joined again, by the plan that the shards store.
    export_model(temporary.path().string() + "/cut", temporary.path().string() + "/again", "", *single_group());
    test::check_equal(given, temporary.path().string() + "/again");
  }
}

TEST_CASE(
    "TensorRT-LLM's embeddings are joined as the ranks' own config.json specifies, which the result does not contain") {
  struct Cut {
    const char* embedding;
    int dim;  ///< -1: all ranks have the whole tensor
  };
  const Model whole = model(false);
  const ParallelLayout layout = ParallelLayout::parse("tp=2,pp=2");
  for (const Cut& cut : {Cut{R"("use_parallel_embedding": true, "embedding_sharding_dim": 0,)", 0},
                         Cut{R"("use_parallel_embedding": true, "embedding_sharding_dim": 1,)", 1},
                         Cut{R"("use_parallel_embedding": true,)", 0},
                         Cut{R"("use_parallel_embedding": false, "embedding_sharding_dim": 1,)", -1}, Cut{"", -1}}) {
    CAPTURE(cut.embedding);
    const TemporaryDirectory temporary;
    const std::string at = temporary.path().string();
    const std::string given = at + "/model";
    const std::string ranks = at + "/ranks";
    write_config(given);
    write_config(ranks);
    write_model(whole, given + "/model.safetensors");
    std::ofstream(ranks + "/config.json")
        << R"({"architecture": "LlamaForCausalLM", "num_attention_heads": 8, "num_key_value_heads": 4, "head_size": 4,)"
        << R"("hidden_size": 16, "intermediate_size": 24, "vocab_size": 37, "num_hidden_layers": 2,)" << cut.embedding
        << R"("mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2}})";
    Files files = trtllm(whole, layout, false);
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      Model& mine = files[static_cast<std::size_t>(rank)];
      const auto embedding = mine.find("transformer.vocab_embedding.weight");
      const int t = layout.coordinates(rank).tensor;
      if (embedding != mine.end() && cut.dim == 0) embedding->second = rows_of_rank(embedding->second, t, 2);
      if (embedding != mine.end() && cut.dim == 1) embedding->second = columns_of_rank(embedding->second, t, 2);
      write_model(mine, ranks + "/rank" + std::to_string(rank) + ".safetensors");
    }
    ExportOptions options;
    options.base_model = given;
    export_model(ranks, at + "/out", "trtllm", *single_group(), options);
    test::check_equal(given, at + "/out");
    // Without a base the sizes come from the ranks, and there is no config.json for the output.
    const ExportReport alone = export_model(ranks, at + "/alone", "trtllm", *single_group());
    CHECK_FALSE(std::filesystem::exists(at + "/alone/config.json"));
    CHECK(test::tensors_of(at + "/alone").size() == whole.size());
    for (const auto& [name, tensor] : test::tensors_of(at + "/alone"))
      CHECK(bitwise_equal(tensor, tensor_of(whole.at(name))));
    std::string notes;
    for (const std::string& note : alone.manifest.notes) notes += note + "\n";
    CHECK(has(notes, "the sizes of the model are read from"));
    REQUIRE(alone.skipped.size() == 1);
    CHECK(alone.skipped.front().name == "config.json");
    CHECK(has(alone.skipped.front().reason, "--base-model"));
    options.base_model.clear();
    options.dtype = DType::bf16;
    export_model(ranks, at + "/cast", "trtllm", *single_group(), options);
    CHECK_FALSE(std::filesystem::exists(at + "/cast/config.json"));
    // Cut for another layout, with the same sizes.
    shard_model(given, at + "/want", {.tensor = 4}, "llama");
    shard_model(ranks, at + "/cut", {.tensor = 4}, "trtllm", {.to_plan = "llama"});
    CHECK_FALSE(std::filesystem::exists(at + "/cut/config.json"));
    for (int rank = 0; rank < 4; ++rank) {
      const SafetensorsFile file = SafetensorsFile::open(at + "/cut/" + shard_file_name(rank, 4));
      std::vector<NamedTensor> tensors;
      for (std::size_t i = 0; i < file.tensors().size(); ++i)
        tensors.emplace_back(file.tensors()[i].name, Tensor::copy_of(file.tensor(i)));
      check_shard(at + "/want/" + shard_file_name(rank, 4), tensors);
    }
  }
}

TEST_CASE("with more Megatron ranks than groups, each rank has a slice of a group") {
  const TemporaryDirectory temporary;
  const std::string given = temporary.path().string() + "/model";
  const std::string shards = temporary.path().string() + "/shards";
  write_config(given);
  write_config(shards);
  const Model whole = model(false);
  write_model(whole, given + "/model.safetensors");
  const ParallelLayout layout{.tensor = 8};
  const Files files = megatron_of_parts(whole, layout, false);
  for (int rank = 0; rank < 8; ++rank)
    write_model(files[static_cast<std::size_t>(rank)], shards + "/" + shard_file_name(rank, 8));
  export_model(shards, temporary.path().string() + "/out", "megatron", *single_group());
  test::check_equal(given, temporary.path().string() + "/out");
  shard_model(given, temporary.path().string() + "/want", {.tensor = 2}, "llama");
  check_shard(temporary.path().string() + "/want/" + shard_file_name(1, 2),
              load_shard(shards, {.tensor = 2}, 1, "megatron"));
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] { shard_model(given, temporary.path().string() + "/cut", layout, "megatron"); }),
            "8 ranks do not divide the 4 groups"));
}

TEST_CASE("scales of quantized matrices follow them, and scales that no plan knows are refused by name") {
  struct Case {
    const char* plan;
    Files (*files)(const Model&, const ParallelLayout&, bool);
    std::map<std::string, std::vector<std::string>>
        scales;  // scales with one element, in layer 0: their value in the result
    const char* unknown;
  };
  const std::string by_groups = "decoder.layers.0.self_attention.linear_qkv.weight_quantizer._amax";
  const std::vector<Case> cases = {
      {"trtllm",
       trtllm,
       {{"transformer.layers.0.attention.qkv.weights_scaling_factor",
         {"self_attn.q_proj.weight_scale", "self_attn.k_proj.weight_scale", "self_attn.v_proj.weight_scale"}},
        {"transformer.layers.0.attention.dense.activation_scaling_factor", {"self_attn.o_proj.input_scale"}},
        {"transformer.layers.0.mlp.fc.weights_scaling_factor", {"mlp.gate_proj.weight_scale"}},
        {"transformer.layers.0.mlp.gate.activation_scaling_factor", {"mlp.up_proj.input_scale"}},
        {"transformer.layers.0.mlp.proj.weights_scaling_factor", {"mlp.down_proj.weight_scale"}}},
       "transformer.layers.0.attention.qkv.prequant_scaling_factor"},
      {"megatron",
       megatron,
       {{"decoder.layers.0.self_attention.linear_qkv.input_quantizer._amax",
         {"self_attn.q_proj.input_quantizer._amax", "self_attn.k_proj.input_quantizer._amax",
          "self_attn.v_proj.input_quantizer._amax"}},
        {"decoder.layers.0.mlp.linear_fc1.weight_quantizer._amax",
         {"mlp.gate_proj.weight_quantizer._amax", "mlp.up_proj.weight_quantizer._amax"}},
        {"decoder.layers.0.mlp.linear_fc2.weight_quantizer._amax", {"mlp.down_proj.weight_quantizer._amax"}},
        {"decoder.layers.0.self_attention.linear_proj.input_quantizer._amax",
         {"self_attn.o_proj.input_quantizer._amax"}}},
       "decoder.layers.0.mlp.experts.linear_fc1.weight_quantizer._amax"}};
  for (const Case& each : cases) {
    CAPTURE(each.plan);
    const TemporaryDirectory temporary;
    const std::string shards = temporary.path().string() + "/shards";
    write_config(shards);
    Model whole = model(false);
    Files files = each.files(whole, {.tensor = 2}, false);
    const auto write = [&] {
      for (int rank = 0; rank < 2; ++rank)
        write_model(files[static_cast<std::size_t>(rank)], shards + "/" + shard_file_name(rank, 2));
    };
    const std::string at = layer_of(0);
    for (const auto& [name, parts] : each.scales) {
      for (Model& file : files) file[name] = filled(1, 1, 7, true);
      for (const std::string& part : parts) whole[at + part] = filled(1, 1, 7, true);
    }
    if (std::string(each.plan) == "megatron") {
      // One scale per row, in the order of the matrix rows.
      for (const char* part : {"q", "k", "v"})
        whole[at + "self_attn." + part + "_proj.weight_quantizer._amax"] =
            pick(whole.at(at + "self_attn." + part + "_proj.weight"), (*part == 'q' ? heads : groups) * head, 1,
                 [](auto r, auto c) { return std::pair(r, c); });
      for (int rank = 0; rank < 2; ++rank)
        files[static_cast<std::size_t>(rank)][by_groups] =
            query_key_value_by_groups(whole, at, "weight_quantizer._amax", rank, 2);
    }
    write();
    export_model(shards, temporary.path().string() + "/out", each.plan, *single_group());
    const auto tensors = test::tensors_of(temporary.path().string() + "/out");
    CHECK(tensors.size() == whole.size());
    for (const auto& [name, matrix] : whole) {
      CAPTURE(name);
      REQUIRE(tensors.contains(name));
      CHECK(bitwise_equal(tensors.at(name), tensor_of(matrix)));
    }
    for (Model& file : files) file[each.unknown] = filled(1, 1, 7, true);
    write();
    const std::string words = words_of(ErrorKind::invalid_argument, [&] { plan_export(shards, each.plan); });
    CHECK(has(words, "no rule"));
    CHECK(has(words, "quant"));
  }
}

TEST_CASE(
    "8-bit floats whose blocks do not divide between ranks: each rank has all scales, and knows its first block") {
  const TemporaryDirectory temporary;
  const std::string given = temporary.path().string() + "/model";
  write_config(given);
  std::vector<NamedTensor> tensors;
  const auto add = [&](const std::string& name, DType dtype, const Shape& shape) {
    Tensor tensor = Tensor::allocate(dtype, shape);
    for (std::uint64_t i = 0; i < tensor.nbytes(); ++i)
      tensor.mutable_data()[i] = static_cast<std::byte>((i * 7 + tensors.size()) % 120);
    tensors.emplace_back(name, tensor);
  };
  const std::string at = "model.layers.0.mlp.";
  for (const auto& [name, rows, columns] :
       {std::tuple("gate_proj", 320, 160), std::tuple("up_proj", 512, 160), std::tuple("down_proj", 160, 320)}) {
    add(at + name + ".weight", DType::f8_e4m3fn, {rows, columns});
    add(at + name + ".weight_scale_inv", DType::f32, {(rows + 127) / 128, (columns + 127) / 128});
  }
  test::write_tensors(given + "/model.safetensors", tensors);
  std::ofstream(given + "/config.json") << "{}";
  for (const int ranks : {2, 4, 6}) {
    CAPTURE(ranks);
    const std::string to = temporary.path().string() + "/" + std::to_string(ranks);
    const ShardReport report = shard_model(given, to, {.tensor = ranks}, "llama");
    CHECK(has(report.notes.at(0), "every rank has the whole tensor"));
    const SafetensorsFile last = SafetensorsFile::open(to + "/" + shard_file_name(ranks - 1, ranks));
    const auto facts = parse_shard_facts(last.metadata());
    REQUIRE(facts);
    CHECK(facts->blocked.contains(at + "up_proj.weight_scale_inv") == (ranks == 6));
    const std::int64_t part = (320 + ranks - 1) / ranks;
    CHECK(facts->blocked.at(at + "gate_proj.weight_scale_inv") == BlockedPart{0, (ranks - 1) * part, 128});
    CHECK(facts->blocked.at(at + "down_proj.weight_scale_inv") == BlockedPart{1, (ranks - 1) * part, 128});
    CHECK(bitwise_equal(last.tensor(at + "gate_proj.weight_scale_inv"), tensors[1].second));
    export_model(to, to + "-whole", "", *single_group());
    test::check_equal(given, to + "-whole");
    export_model(to, to + "-anew", "", *single_group(), {.target_layout = ParallelLayout{.tensor = 3}});
    export_model(to + "-anew", to + "-again", "", *single_group());
    test::check_equal(given, to + "-again");
  }
}
