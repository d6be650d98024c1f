// SPDX-License-Identifier: Apache-2.0
// The options of an export: sources of any name, a cast, a selection, tied tensors, a base model, the size of files.

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "muster/error.hpp"
#include "muster/export.hpp"
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

TEST_CASE("a model in safetensors files of any name is accepted, and so is a single file") {
  const TemporaryDirectory temporary(test::Medium::memory);
  const std::string at = temporary.path().string();
  Model whole = model(false);
  erase_biases(whole);
  write_config(at + "/given");
  write_model(whole, at + "/given/model.safetensors");
  std::filesystem::create_directory(at + "/mistral");
  std::ofstream(at + "/mistral/params.json") << "{}";
  write_model(meta(whole, {}, false).front(), at + "/mistral/consolidated.safetensors");
  for (const std::string source : {"/mistral", "/mistral/consolidated.safetensors"}) {
    CAPTURE(source);
    const std::string out = at + "/of" + std::to_string(source.size());
    ExportOptions options;
    options.base_model = at + "/given";
    export_model(at + source, out, "meta", *single_group(), options);
    test::check_equal(at + "/given", out);
  }
  ShardOptions with_base;
  with_base.base_model = at + "/given";
  shard_model(at + "/given/model.safetensors", at + "/shards", {.tensor = 2}, "llama", with_base);
  export_model(at + "/shards", at + "/again", "", *single_group());
  write_config(at + "/again");  // a single file has no config.json beside it
  test::check_equal(at + "/given", at + "/again");
  // A rank's shard is not a model.
  CHECK_THROWS_AS(export_model(at + "/shards/" + shard_file_name(0, 2), at + "/no", "", *single_group()), Error);
}

TEST_CASE("an export casts and selects, and a number that would become infinite ends it without any output") {
  const TemporaryDirectory temporary;
  const std::string shards = temporary.path().string() + "/shards";
  write_config(shards);
  Model whole = model(false);
  write_model(vllm(whole, {}, false).front(), shards + "/" + shard_file_name(0, 1));
  ExportOptions options;
  options.dtype = DType::bf16;
  options.exclude = "lm_head.*";
  const ExportReport report =
      export_model(shards, temporary.path().string() + "/out", "vllm", *single_group(), options);
  CHECK(report.manifest.dropped.size() == 1);
  CHECK(report.manifest.dropped.front().reason == "it was not selected");
  const auto tensors = test::tensors_of(temporary.path().string() + "/out");
  CHECK_FALSE(tensors.contains("lm_head.weight"));
  const Tensor& keys = tensors.at("model.layers.1.self_attn.k_proj.weight");
  CHECK(keys.dtype() == DType::bf16);
  const float first = whole.at("model.layers.1.self_attn.k_proj.weight").at(0, 0);
  std::uint16_t stored = 0;
  std::memcpy(&stored, keys.data(), 2);
  CHECK(std::abs(std::bit_cast<float>(std::uint32_t{stored} << 16) - first) <= first / 256);

  options.dtype = DType::f16;
  CHECK(
      has(words_of(ErrorKind::invalid_argument,
                   [&] { export_model(shards, temporary.path().string() + "/no", "vllm", *single_group(), options); }),
          "is finite and would become infinite"));
  CHECK_FALSE(std::filesystem::exists(temporary.path().string() + "/no"));
  options.select = "no such*";
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { plan_export(shards, "vllm", options); }),
            "no tensor matches --select"));
}

TEST_CASE("tensors that a view leaves out are in the account, with their bytes") {
  const TemporaryDirectory temporary(test::Medium::memory);
  const std::string at = temporary.path().string();
  write_config(at + "/shards");
  const Model whole = model(false);
  write_model(whole, at + "/shards/" + shard_file_name(0, 1));
  std::uint64_t bytes = 0;
  for (const auto& [name, matrix] : whole) bytes += matrix.values.size() * sizeof(float);
  test::write_text(at + "/plan.json", R"({"muster_plan": 1, "views": [{"match": "lm_head.*", "drop": "no need"}],
      "rules": [{"match": "*", "action": "same"}]})");
  const ExportManifest account = plan_export(at + "/shards", at + "/plan.json");
  REQUIRE(account.dropped.size() == 1);
  CHECK(account.dropped.front().reason == "no need");
  CHECK(account.tensors_in == whole.size());
  CHECK(account.tensors_out == whole.size() - 1);
  CHECK(account.bytes_in == bytes);
  CHECK(account.bytes_out == bytes - whole.at("lm_head.weight").values.size() * sizeof(float));
}

TEST_CASE("a head that is tied to the embeddings is compared and left out; a different one ends the export") {
  const TemporaryDirectory temporary;
  Model whole = model(false);
  whole["lm_head.weight"] = whole["model.embed_tokens.weight"];
  const std::string plan = temporary.path().string() + "/plan.json";
  std::ofstream(plan) << R"({"muster_plan": 1, "extends": "megatron", "rules": [
      {"match": "lm_head.weight", "action": "tie", "with": "model.embed_tokens.weight"}]})";
  const ParallelLayout layout = ParallelLayout::parse("tp=2,pp=2");
  for (const bool is_equal : {true, false}) {
    const std::string shards = temporary.path().string() + (is_equal ? "/equal" : "/other");
    write_config(shards);
    if (!is_equal) whole["lm_head.weight"].values.back() += 1;
    const Files files = megatron(whole, layout, false);
    for (int rank = 0; rank < 4; ++rank)
      write_model(files[static_cast<std::size_t>(rank)], shards + "/" + shard_file_name(rank, 4));
    ExportOptions options;
    options.source_layout = layout;
    const auto merge = [&] { return export_model(shards, shards + "-out", plan, *single_group(), options); };
    if (is_equal) {
      const ExportReport report = merge();
      REQUIRE(report.manifest.dropped.size() == 1);
      CHECK(report.manifest.dropped.front().reason == "it is tied to \"model.embed_tokens.weight\"");
      CHECK_FALSE(test::tensors_of(shards + "-out").contains("lm_head.weight"));
    } else {
      CHECK(has(words_of(ErrorKind::rank_mismatch, merge),
                "tensor \"lm_head.weight\" of rank 3 and \"model.embed_tokens.weight\" of rank 1 have different "
                "values, but the plan or \"tie_word_embeddings\" in config.json ties them"));
    }
  }
}

TEST_CASE("with a base whose config.json ties the head, the head is compared and left out") {
  const TemporaryDirectory temporary(test::Medium::memory);
  const std::string at = temporary.path().string();
  write_config(at + "/base");
  std::string config = test::read_text(at + "/base/config.json");
  test::write_text(at + "/base/config.json", config.replace(0, 1, R"({"tie_word_embeddings": true, )"));
  const ParallelLayout layout = ParallelLayout::parse("tp=2,pp=2");
  ExportOptions options;
  options.base_model = at + "/base";
  for (const std::string kind : {"equal", "other", "cast"}) {
    CAPTURE(kind);
    Model whole = model(false);
    whole["lm_head.weight"] = whole["model.embed_tokens.weight"];
    if (kind == "other") whole["lm_head.weight"].values.back() += 1;
    // A model of one rank, and the files of four.
    std::filesystem::create_directory(at + "/" + kind);
    write_model(whole, at + "/" + kind + "/model.safetensors");
    ShardOptions sharding;
    sharding.base_model = at + "/base";
    shard_model(at + "/" + kind, at + "/" + kind + "-ranks", layout, "llama", sharding);
    if (kind == "cast") options.dtype = DType::bf16;
    for (const std::string& source : {kind, kind + "-ranks"}) {
      CAPTURE(source);
      const std::string out = at + "/" + source + "-out";
      const auto merge = [&] { return export_model(at + "/" + source, out, "", *single_group(), options); };
      if (kind == "other") {
        CHECK(has(words_of(ErrorKind::rank_mismatch, merge), "have different values, but the plan or \"tie_word_emb"));
        CHECK_FALSE(std::filesystem::exists(out));
        continue;
      }
      const ExportReport report = merge();
      REQUIRE(report.manifest.dropped.size() == 1);
      CHECK(report.manifest.dropped.front().reason == "config.json ties it to \"model.embed_tokens.weight\"");
      CHECK_FALSE(test::tensors_of(out).contains("lm_head.weight"));
      CHECK(test::tensors_of(out).size() == whole.size() - 1);
    }
  }
  Model larger = model(false);
  larger["lm_head.weight"] =
      pick(larger["model.embed_tokens.weight"], 40, 16, [](auto r, auto c) { return std::pair(r, c); });
  std::filesystem::create_directory(at + "/larger");
  write_model(larger, at + "/larger/model.safetensors");
  CHECK(has(words_of(ErrorKind::invalid_argument,
                     [&] { export_model(at + "/larger", at + "/no", "", *single_group(), options); }),
            "but \"lm_head.weight\" is BF16 [40, 16], and \"model.embed_tokens.weight\" is BF16 [37, 16]"));
  // Without a base or a dtype the model does not change.
  test::write_text(at + "/equal/config.json", test::read_text(at + "/base/config.json"));
  export_model(at + "/equal", at + "/same", "", *single_group());
  test::check_equal(at + "/equal", at + "/same");
}

TEST_CASE("a model is written with another file layout, and a base gives its config and tokenizer") {
  const TemporaryDirectory temporary;
  const std::string at = temporary.path().string();
  const Model whole = model(false);
  write_config(at + "/model");
  write_model(whole, at + "/model/model.safetensors");
  ExportOptions options;
  options.max_shard_size = 20'000;
  CHECK(export_model(at + "/model", at + "/parts", "", *single_group(), options).manifest.files == 2);
  test::check_equal(at + "/model", at + "/parts");

  std::filesystem::create_directory(at + "/base");
  const std::string base_config =
      R"({"model_type": "llama", "dtype": "float16", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
      "hidden_size": 16, "vocab_size": 37, "num_hidden_layers": 2, "quantization_config": {"quant_method": "x"}})";
  std::ofstream(at + "/base/config.json") << base_config;
  std::ofstream(at + "/base/tokenizer.json") << "{}";
  std::filesystem::create_directory(at + "/bare");
  write_model(vllm(whole, {}, false).front(), at + "/bare/" + shard_file_name(0, 1));
  options = {};
  options.base_model = at + "/base";
  options.dtype = DType::bf16;
  const ExportReport report = export_model(at + "/bare", at + "/out", "vllm", *single_group(), options);
  const auto config = read_model_config(at + "/out");
  REQUIRE(config);
  CHECK(config->at("dtype").as_string() == "bfloat16");
  CHECK_FALSE(config->contains("quantization_config"));
  CHECK(std::filesystem::exists(at + "/out/tokenizer.json"));
  CHECK(report.manifest.notes.size() == 2);

  const auto refused = [&](const std::string& text) {
    std::ofstream(at + "/base/config.json") << text;
    return words_of(ErrorKind::invalid_argument, [&] { plan_export(at + "/bare", "vllm", options); });
  };
  std::string other = base_config;
  CHECK(has(refused(other.replace(other.find("\"vocab_size\": 37"), 16, "\"vocab_size\": 99")), "true size"));
  other = base_config;
  CHECK(has(refused(other.replace(other.find("\"num_hidden_layers\": 2"), 22, "\"num_hidden_layers\": 3")),
            "no tensor belongs to layer 2"));
  Model headless = vllm(whole, {}, false).front();
  headless.erase("lm_head.weight");
  write_model(headless, at + "/bare/" + shard_file_name(0, 1));
  other = base_config;
  CHECK(has(refused(other.replace(0, 1, "{\"tie_word_embeddings\": false, ")), "lm_head.weight does not exist"));
}
