// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/thirdparty/saved_config.hpp"

#include <fmt/core.h>

#include <array>
#include <filesystem>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/thirdparty/torch_weights.hpp"

namespace muster::thirdparty {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t longest_params = std::uint64_t{1} << 20;

/// Builds a config from `number`, which returns the value that the file has under a name. Ignores values below 1.
template <class Number>
Config config_from(const Number& number, bool has_groups, std::vector<std::string>& notes) {
  Config config = Config::object();
  // Pairs of a name in config.json and a name in the file. The first pair whose name the file has determines the value.
  constexpr std::array<std::pair<std::string_view, std::string_view>, 16> names = {
      {{"num_attention_heads", "num_attention_heads"},
       {"num_attention_heads", "n_heads"},
       {"num_key_value_heads", "num_query_groups"},
       {"num_key_value_heads", "n_kv_heads"},
       {"num_key_value_heads", "num_attention_heads"},
       {"num_key_value_heads", "n_heads"},
       {"hidden_size", "hidden_size"},
       {"hidden_size", "dim"},
       {"num_hidden_layers", "num_layers"},
       {"num_hidden_layers", "n_layers"},
       {"head_dim", "kv_channels"},
       {"head_dim", "head_dim"},
       {"intermediate_size", "ffn_hidden_size"},
       {"vocab_size", "vocab_size"},
       {"vocab_size", "padded_vocab_size"},
       {"num_local_experts", "num_experts"}}};
  for (const auto& [ours, theirs] : names) {
    if (config.contains(ours) || (theirs == "num_query_groups" && !has_groups)) continue;
    const std::optional<std::int64_t> value = number(theirs);
    if (!value || *value < 1) continue;
    config[std::string(ours)] = *value;
    if (theirs == "padded_vocab_size")
      notes.push_back(fmt::format(
          "the vocabulary keeps its {} padded rows, because the saved arguments do not have its true size", *value));
  }
  return config;
}

/// Returns the files of a checkpoint that may contain the arguments of Megatron.
std::vector<std::string> files_with_arguments(const FoundCheckpoint& found) {
  if (found.kind == CheckpointKind::ranks) return {found.by_rank.front().front()};
  if (found.kind == CheckpointKind::dcp) return {"common.pt"};
  if (found.kind == CheckpointKind::deepspeed)
    return {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"};
  return {};
}

std::optional<Config> from_arguments(const std::string& path, std::vector<std::string>& notes) {
  const os::ReadableFile file = os::ReadableFile::open(path);
  const TorchArchive archive = open_torch_file(file);
  const formats::Pickle& pickle = archive.pickle();
  const auto arguments = pickle.find(pickle.root(), "args");
  const auto find = [&](std::string_view name) { return arguments ? pickle.find(*arguments, name) : std::nullopt; };
  if (!find("num_attention_heads")) return std::nullopt;
  const auto is_true = [&](std::string_view name) {
    const auto value = find(name);
    return value && pickle.integer(*value).value_or(0) != 0;
  };
  Config config = config_from(
      [&](std::string_view name) {
        const auto value = find(name);
        return value ? pickle.integer(*value) : std::nullopt;
      },
      // If the flag is false, Megatron ignores num_query_groups, whose value is then 1.
      !find("group_query_attention") || is_true("group_query_attention"), notes);
  if (find("untie_embeddings_and_output_weights"))
    config["tie_word_embeddings"] = !is_true("untie_embeddings_and_output_weights");
  return config;
}

std::optional<Config> from_params(const std::string& path, std::vector<std::string>& notes) {
  const Config params = with_file("reading", path, [&] { return parse_json(read_text(path, longest_params)); });
  if (!params.is_object()) return std::nullopt;
  return config_from(
      [&](std::string_view name) -> std::optional<std::int64_t> {
        const Config* value = params.find(name);
        if (value == nullptr || value->type() != Config::Type::integer) return std::nullopt;
        return value->as_int();
      },
      true, notes);
}

/// TensorRT-LLM has Hugging Face's names, with one exception.
Config from_trtllm(Config config) {
  if (const Config* size = config.find("head_size"); size != nullptr && !config.contains("head_dim")) {
    const Config value = *size;
    config["head_dim"] = value;
  }
  return config;
}

}  // namespace

Config saved_facts(const FoundCheckpoint& found) {
  Config facts = Config::object();
  if (!found.config) return facts;
  const Config* shared = found.config->find("use_parallel_embedding");
  if (shared == nullptr || *shared != Config(true)) return facts;
  const Config* dim = found.config->find("embedding_sharding_dim");
  const bool is_by_columns = dim != nullptr && *dim == Config(1);
  facts[is_by_columns ? "embeddings_by_columns" : "embeddings_by_rows"] = true;
  return facts;
}

std::optional<Config> saved_config(const FoundCheckpoint& found, std::vector<std::string>& notes) {
  std::error_code error;
  if (found.config) {
    notes.push_back(fmt::format("the sizes of the model are read from {}, which TensorRT-LLM wrote",
                                in_quotes(join_path(found.path, "config.json"))));
    return from_trtllm(*found.config);
  }
  const auto read = [&](const std::string& name, const auto& from) -> std::optional<Config> {
    const std::string path = join_path(found.path, name);
    if (!fs::is_regular_file(path, error)) return std::nullopt;
    std::optional<Config> config = from(path, notes);
    if (config)
      notes.push_back(
          fmt::format("the sizes of the model are read from {}, because config.json does not exist", in_quotes(path)));
    return config;
  };
  for (const std::string& name : files_with_arguments(found))
    if (fs::is_regular_file(join_path(found.path, name), error) && is_torch_file(join_path(found.path, name)))
      if (auto config = read(name, from_arguments)) return config;
  return found.kind == CheckpointKind::ranks ? read("params.json", from_params) : std::nullopt;
}

}  // namespace muster::thirdparty
