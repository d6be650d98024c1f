// SPDX-License-Identifier: Apache-2.0
// Rank files cut in the ways of training and serving programs. A model whose elements follow a formula is cut here. A
// plan must restore every tensor.

#include <doctest/doctest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/source.hpp"
#include "src/checkpoint/thirdparty/checkpoint.hpp"
#include "src/checkpoint/thirdparty/saved_config.hpp"
#include "src/formats/safetensors.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"
#include "tests/support/torch_files.hpp"

using namespace muster;
using namespace muster::test;

namespace {

namespace fs = std::filesystem;
using FloatRows = std::vector<std::vector<float>>;  // a vector has one row

constexpr int on_all = -1;

struct Whole {
  std::string name;  ///< with the layer number of the model
  int rows = 0;      ///< 1: a vector
  int columns = 0;
  int dim = on_all;    ///< the dimension that is cut
  int blocks = 1;      ///< number of fused blocks, each cut separately
  int stage = on_all;  ///< stage of a tensor outside the layers
};

FloatRows make(const Whole& whole, std::size_t seed) {
  FloatRows values(static_cast<std::size_t>(whole.rows));
  for (int i = 0; i < whole.rows * whole.columns; ++i)
    values[static_cast<std::size_t>(i / whole.columns)].push_back(static_cast<float>(1000 * seed) +
                                                                  static_cast<float>(i));
  return values;
}

FloatRows turned(const FloatRows& values) {
  FloatRows out(values.front().size());
  for (const std::vector<float>& row : values)
    for (std::size_t i = 0; i < row.size(); ++i) out[i].push_back(row[i]);
  return out;
}

/// Returns the part of one rank, cut from each block.
FloatRows part_of(const FloatRows& values, int dim, int blocks, int rank, int ranks) {
  if (dim == on_all) return values;
  if (dim == 1) return turned(part_of(turned(values), 0, blocks, rank, ranks));
  FloatRows out;
  const std::size_t block = values.size() / static_cast<std::size_t>(blocks);
  const std::size_t step = block / static_cast<std::size_t>(ranks);
  for (std::size_t begin = 0; begin < values.size(); begin += block)
    for (std::size_t i = 0; i < step; ++i) out.push_back(values[begin + static_cast<std::size_t>(rank) * step + i]);
  return out;
}

std::string bytes_of(const FloatRows& values) {
  std::string out;
  for (const std::vector<float>& row : values)
    out.append(reinterpret_cast<const char*>(row.data()), row.size() * sizeof(float));
  return out;
}

struct Local {
  std::string name;
  std::vector<std::int32_t> shape;
  std::string bytes;
};

/// Returns a dict of tensors below `key`, with other training state, as torch.save writes it.
std::string torch_file(const std::vector<Local>& tensors, const std::string& key) {
  using namespace pickled;
  std::vector<std::pair<std::string, std::string>> dict_of;
  std::vector<std::pair<std::string, std::string>> storages;
  for (const Local& tensor : tensors) {
    const std::string number = std::to_string(storages.size());
    const auto count = static_cast<std::int32_t>(tensor.bytes.size() / sizeof(float));
    const std::vector<std::int32_t> strides =
        tensor.shape.size() == 1 ? std::vector<std::int32_t>{1} : std::vector<std::int32_t>{tensor.shape[1], 1};
    dict_of.emplace_back(tensor.name, pickled::tensor(number, "FloatStorage", count, 0, tensor.shape, strides));
    storages.emplace_back(number, tensor.bytes);
  }
  const std::string object =
      key.empty() ? dict(dict_of)
                  : dict({{key, dict(dict_of)},
                          {"args", call(global("argparse", "Namespace"), ")") + dict({{"lr", number(1)}}) + "b"},
                          {"iteration", number(10)}});
  return make_zip(torch_parts(whole(object), storages));
}

std::string safetensors_file(const std::vector<Local>& tensors) {
  std::vector<TensorEntry> entries;
  for (const Local& tensor : tensors)
    entries.push_back(
        {tensor.name, DType::f32, Shape(tensor.shape.begin(), tensor.shape.end()), 0, tensor.bytes.size()});
  std::string out = make_safetensors_header(entries, {}, "a test");
  for (const TensorEntry& entry : entries) out += std::ranges::find(tensors, entry.name, &Local::name)->bytes;
  return out;
}

/// One way to save a model.
struct Way {
  std::string name;
  std::vector<Whole> model;
  int tensor = 1;
  int stages = 1;
  int layers = 2;                                        ///< of the model
  std::function<std::string(int rank, int stage)> file;  ///< path of the file; {part} if there are two
  std::string key = {};                                  ///< for torch.save: the key of the weights
  std::string plan;
  std::string config = {};
};

std::vector<Way> ways() {
  const auto two = [](int number) { return "0" + std::to_string(number); };
  const std::vector<Whole> megatron = {
      {"embedding.word_embeddings.weight", 8, 4, 0, 1, 0},
      {"decoder.layers.0.input_layernorm.weight", 1, 4},
      {"decoder.layers.0.mlp.linear_fc1.weight", 16, 4, 0, 2},
      {"decoder.layers.0.mlp.linear_fc2.weight", 4, 8, 1},
      {"decoder.layers.1.input_layernorm.weight", 1, 4},
      {"decoder.layers.1.mlp.linear_fc1.weight", 16, 4, 0, 2},
      {"decoder.layers.1.mlp.linear_fc2.weight", 4, 8, 1},
      {"decoder.final_layernorm.weight", 1, 4, on_all, 1, 1},
      {"output_layer.weight", 8, 4, 0, 1, 1},
  };
  const std::string megatron_plan = R"({"muster_plan": 1, "layers": {"match": "decoder.layers.#.*", "renumber": true},
    "rules": [{"match": "embedding.word_embeddings.weight", "action": "concat", "dim": 0},
              {"match": "output_layer.weight", "action": "concat", "dim": 0, "stage": "last"},
              {"match": "*.final_layernorm.weight", "action": "same", "stage": "last"},
              {"match": "*.linear_fc1.weight", "action": "concat", "dim": 0, "blocks": [1, 1]},
              {"match": "*.linear_fc2.weight", "action": "concat", "dim": 1},
              {"match": "*layernorm.weight", "action": "same"}]})";
  std::vector<Whole> megatron_on_one = megatron;
  for (Whole& whole : megatron_on_one) whole.stage = whole.stage == 1 ? 0 : whole.stage;
  return {
      {"Megatron-LM", megatron_on_one, 2, 1, 2,
       [&](int rank, int) { return "mp_rank_" + two(rank) + "/model_optim_rng.pt"; }, "model", megatron_plan},
      {"Megatron-LM with stages", megatron, 2, 2, 2,
       [&](int rank, int stage) {
         return "mp_rank_" + two(rank) + "_00" + std::to_string(stage) + "/model_optim_rng.pt";
       },
       "model", megatron_plan},
      {"Meta",
       {{"tok_embeddings.weight", 6, 4, 1},
        {"layers.0.attention.wq.weight", 4, 4, 0},
        {"layers.0.attention.wo.weight", 4, 4, 1},
        {"layers.0.attention_norm.weight", 1, 4},
        {"output.weight", 6, 4, 0}},
       2,
       1,
       1,
       [&](int rank, int) { return "consolidated." + two(rank) + ".pth"; },
       "",
       R"({"muster_plan": 1, "rules": [{"match": "{tok_embeddings,*.wo}.weight", "action": "concat", "dim": 1},
           {"match": "*norm.weight", "action": "same"}, {"match": "*", "action": "concat", "dim": 0}]})"},
      {"sharded_state",
       {{"model.embed_tokens.weight", 8, 4, 0},
        {"model.layers.0.mlp.gate_up_proj.weight", 16, 4, 0, 2},
        {"model.layers.0.mlp.down_proj.weight", 4, 8, 1},
        {"model.norm.weight", 1, 4}},
       2,
       1,
       1,
       [](int rank, int) { return "model-rank-" + std::to_string(rank) + "-part-{part}.safetensors"; },
       "",
       "llama"},
      {"TensorRT-LLM",
       {{"transformer.vocab_embedding.weight", 8, 4, on_all, 1, 0},
        {"transformer.layers.0.mlp.fc.weight", 8, 4, 0},
        {"transformer.layers.0.mlp.gate.weight", 8, 4, 0},
        {"transformer.layers.0.mlp.proj.weight", 4, 8, 1},
        {"transformer.layers.1.mlp.fc.weight", 8, 4, 0},
        {"transformer.layers.1.mlp.gate.weight", 8, 4, 0},
        {"transformer.layers.1.mlp.proj.weight", 4, 8, 1},
        {"transformer.ln_f.weight", 1, 4, on_all, 1, 1},
        {"lm_head.weight", 8, 4, 0, 1, 1}},
       2,
       2,
       2,
       [](int rank, int stage) { return "rank" + std::to_string(rank + 2 * stage) + ".safetensors"; },
       "",
       R"({"muster_plan": 1, "layers": {"match": "transformer.layers.#.*", "renumber": true},
           "rules": [{"match": "transformer.vocab_embedding.weight", "action": "same"},
                     {"match": "transformer.ln_f.weight", "action": "same", "stage": "last"},
                     {"match": "lm_head.weight", "action": "concat", "dim": 0, "stage": "last"},
                     {"match": "*.mlp.proj.weight", "action": "concat", "dim": 1},
                     {"match": "*.mlp.{fc,gate}.weight", "action": "concat", "dim": 0}]})",
       R"({"architecture": "LlamaForCausalLM", "mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2}})"},
  };
}

/// Layers are numbered from 0 in each stage.
std::optional<std::string> local_name(const Way& way, const std::string& name, int stage) {
  const std::size_t at = name.find("layers.");
  if (at == std::string::npos) return name;
  const std::size_t digit = at + std::strlen("layers.");
  const int per_stage = way.layers / way.stages;
  const int layer = name[digit] - '0';
  if (layer / per_stage != stage) return std::nullopt;
  std::string local = name;
  local[digit] = static_cast<char>('0' + layer % per_stage);
  return local;
}

void save(const Way& way, const std::string& folder) {
  for (int stage = 0; stage < way.stages; ++stage)
    for (int rank = 0; rank < way.tensor; ++rank) {
      std::vector<Local> tensors;
      for (std::size_t i = 0; i < way.model.size(); ++i) {
        const Whole& whole = way.model[i];
        const auto name = local_name(way, whole.name, stage);
        if (!name || (whole.stage != on_all && whole.stage != stage)) continue;
        const FloatRows part = part_of(make(whole, i), whole.dim, whole.blocks, rank, way.tensor);
        std::vector<std::int32_t> shape = {static_cast<std::int32_t>(part.size()),
                                           static_cast<std::int32_t>(part.front().size())};
        if (whole.rows == 1) shape.erase(shape.begin());
        tensors.push_back({*name, shape, bytes_of(part)});
      }
      const std::string path = folder + "/" + way.file(rank, stage);
      fs::create_directories(fs::path(path).parent_path());
      const std::size_t field = path.find("{part}");
      if (!path.ends_with(".safetensors")) {
        write_text(path, torch_file(tensors, way.key));
      } else if (field == std::string::npos) {
        write_text(path, safetensors_file(tensors));
      } else {
        const auto half = tensors.begin() + static_cast<std::ptrdiff_t>(tensors.size() / 2);
        write_text(std::string(path).replace(field, 6, "0"), safetensors_file({tensors.begin(), half}));
        write_text(std::string(path).replace(field, 6, "1"), safetensors_file({half, tensors.end()}));
      }
    }
  if (!way.config.empty()) write_text(folder + "/config.json", way.config);
}

}  // namespace

TEST_CASE("tensors cut by ranks are restored") {
  for (const Way& way : ways()) {
    CAPTURE(way.name);
    const TemporaryDirectory folder(Medium::memory);
    fs::create_directory(folder / "in");
    save(way, folder / "in");
    std::string plan = way.plan;
    if (plan.starts_with('{')) {
      plan = folder / "plan.json";
      write_text(plan, way.plan);
    }
    const Source source = open_source(folder / "in", {.plan = plan});
    CHECK(source.entries().size() == way.model.size());
    for (std::size_t i = 0; i < way.model.size(); ++i) {
      const Whole& whole = way.model[i];
      CAPTURE(whole.name);
      const auto place = source.tensors->find(whole.name);
      REQUIRE(place.has_value());
      CHECK(source.entries()[*place].shape ==
            (whole.rows == 1 ? Shape{whole.columns} : Shape{whole.rows, whole.columns}));
      std::string bytes(source.entries()[*place].bytes, ' ');
      source.tensors->read(*place, 0, std::as_writable_bytes(std::span(bytes)));
      CHECK(bytes == bytes_of(make(whole, i)));
    }
  }
}

TEST_CASE("virtual stages are named, and selected one by one") {
  using namespace pickled;
  const TemporaryDirectory folder(Medium::memory);
  const auto stage = [](std::string_view key) { return dict({{"w", tensor(key, "FloatStorage", 2, 0, {2}, {1})}}); };
  write_text(folder / "file.pt", make_zip(torch_parts(whole(dict({{"model0", stage("0")}, {"model1", stage("1")}})),
                                                      {{"0", "aaaabbbb"}, {"1", "ccccdddd"}})));
  const auto found = thirdparty::find_checkpoint(folder / "file.pt");
  std::vector<std::string> notes;
  CHECK(has(words_of(ErrorKind::not_found, [&] { open_checkpoint(*found, 0, {}, notes); }),
            "virtual pipeline stages. Choose one with --key, such as --key model0"));
  const auto tensors = open_checkpoint(*found, 0, {.key = "model1", .file_pattern = {}}, notes);
  std::string bytes(8, ' ');
  tensors->read(0, 0, std::as_writable_bytes(std::span(bytes)));
  CHECK(bytes == "ccccdddd");
}

namespace {

using Arguments = std::vector<std::pair<std::string, int>>;

/// The contents of a Megatron file with these arguments.
std::string megatron_file(const Arguments& arguments) {
  using namespace pickled;
  std::vector<std::pair<std::string, std::string>> numbers;
  for (const auto& [name, value] : arguments) numbers.emplace_back(name, number(value));
  return make_zip(
      torch_parts(whole(dict({{"args", call(global("argparse", "Namespace"), ")") + dict(numbers) + "b"},
                              {"model", dict({{"decoder.layers.0.w", tensor("0", "FloatStorage", 2, 0, {2}, {1})}})}})),
                  {{"0", "aaaabbbb"}}));
}

std::optional<Config> config_of(const Arguments& arguments, std::vector<std::string>& notes) {
  const TemporaryDirectory folder(Medium::memory);
  fs::create_directory(folder / "mp_rank_00");
  write_text(folder / "mp_rank_00/model_optim_rng.pt", megatron_file(arguments));
  return thirdparty::saved_config(*thirdparty::find_checkpoint(folder.path().string()), notes);
}

struct Written {
  std::string name;
  std::function<Arguments(int tensor, int stage)> arguments;  ///< of the file in this rank's folder
  std::string refusal = {};
};

std::vector<Written> written_by() {
  const auto job = [](int processes, Arguments more) {
    Arguments all = {{"tensor_model_parallel_size", 2}, {"pipeline_model_parallel_size", 2}, {"world_size", processes}};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const std::string tensor_words =
      "the folder was renamed or swapped: the saved arguments have tensor-parallel rank 1, and the names of the "
      "folders have 0";
  const std::string stage_words =
      "the folder was renamed or swapped: the saved arguments have pipeline stage 1, and the names of the folders have "
      "0";
  return {
      {"each rank its own",
       [=](int t, int p) {
         return job(4, {{"rank", 2 * p + t}});
       }},
      {"with copies of the data",
       [=](int t, int p) {
         return job(8, {{"rank", 4 * p + t}});
       }},
      {"with copies of the data outside",
       [=](int t, int p) {
         return job(8, {{"rank", 2 * p + t}, {"use_tp_pp_dp_mapping", 1}});
       }},
      {"converted by one process",
       [=](int, int) {
         return job(4, {{"rank", 0}});
       }},
      {"no arguments", [](int, int) { return Arguments(); }},
      {"ranks exchanged",
       [=](int t, int p) {
         return job(4, {{"rank", 2 * p + (1 - t)}});
       },
       tensor_words},
      {"stages exchanged",
       [=](int t, int p) {
         return job(4, {{"rank", 2 * (1 - p) + t}});
       },
       stage_words},
      {"stages exchanged with copies of the data",
       [=](int t, int p) {
         return job(8, {{"rank", 4 * (1 - p) + t}});
       },
       stage_words},
      {"ranks exchanged, by their own number",
       [=](int t, int) {
         return job(4, {{"tensor_model_parallel_rank", 1 - t}});
       },
       tensor_words},
      {"a file copied for another rank",
       [=](int, int) {
         return job(4, {{"tensor_model_parallel_rank", 0}});
       },
       "the folder was renamed or swapped: the saved arguments have tensor-parallel rank 0, and the names of the "
       "folders have 1"},
      {"stages exchanged, by their own number",
       [=](int, int p) {
         return job(4, {{"pipeline_model_parallel_rank", 1 - p}});
       },
       stage_words},
      {"a file of a larger job",
       [=](int t, int p) {
         Arguments all = job(4, {{"rank", 2 * p + t}});
         if (t == 1) all.front().second = 4;
         return all;
       },
       "the folder was renamed or swapped: the saved arguments have tensor_model_parallel_size 4, and the names of the "
       "folders have 2"},
  };
}

}  // namespace

TEST_CASE("the saved arguments of Megatron become the config") {
  std::vector<std::string> notes;
  CHECK(!config_of({{"hidden_size", 64}}, notes));
  for (const int flag : {0, 1}) {
    const Arguments arguments = {{"num_attention_heads", 8},
                                 {"num_query_groups", 2},
                                 {"group_query_attention", flag},
                                 {"hidden_size", 64},
                                 {"num_layers", 0},
                                 {"padded_vocab_size", 96},
                                 {"untie_embeddings_and_output_weights", flag}};
    const Config expected = Config::object({{"num_attention_heads", 8},
                                            {"num_key_value_heads", flag == 0 ? 8 : 2},
                                            {"hidden_size", 64},
                                            {"vocab_size", 96},
                                            {"tie_word_embeddings", flag == 0}});
    CHECK(config_of(arguments, notes) == expected);
  }
  CHECK(has(notes.front(), "keeps its 96 padded rows"));
}

TEST_CASE("a tensor in two files of one rank is refused by name") {
  const TemporaryDirectory folder(Medium::memory);
  for (const char part : {'0', '1'})
    write_text(folder / (std::string("model-rank-0-part-") + part + ".safetensors"),
               safetensors_file({{"w", {1}, std::string(4, part)}}));
  std::vector<std::string> notes;
  CHECK(
      has(words_of(ErrorKind::corrupt,
                   [&] { (void)open_checkpoint(*thirdparty::find_checkpoint(folder.path().string()), 0, {}, notes); }),
          "rank 0: tensor \"w\": the name is duplicated"));
}

TEST_CASE("a file in the folder of another Megatron rank is refused, and both are named") {
  for (const Written& written : written_by()) {
    CAPTURE(written.name);
    const TemporaryDirectory folder(Medium::memory);
    for (int p = 0; p < 2; ++p)
      for (int t = 0; t < 2; ++t) {
        const std::string at = folder / ("mp_rank_0" + std::to_string(t) + "_00" + std::to_string(p));
        fs::create_directory(at);
        write_text(at + "/model_optim_rng.pt", megatron_file(written.arguments(t, p)));
      }
    std::string words;
    const auto found = thirdparty::find_checkpoint(folder.path().string());
    REQUIRE(found.has_value());
    for (int rank = 0; rank < 4; ++rank) {
      std::vector<std::string> notes;
      try {
        (void)open_checkpoint(*found, rank, {}, notes);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::rank_mismatch);
        words += std::string(error.what()) + "\n";
      }
    }
    CHECK(words.empty() == written.refusal.empty());
    CHECK(has(words, written.refusal));
    if (!written.refusal.empty()) CHECK(has(words, "model_optim_rng.pt"));
  }
}
