// SPDX-License-Identifier: Apache-2.0
// The models of HuggingFace's transformers whose tensor names a built-in plan has rules for: each has been made there
// with random weights, and its names are in tests/data/model_names. Models with parts that no plan has rules for
// (vision towers, linear attention) are not here: they need a plan of their own.

#include "src/checkpoint/plan_auto.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

struct Model {
  std::string_view type;          // "model_type"
  std::string_view architecture;  // "architectures" begins with it and goes on with "For...", "Model" or "LMHeadModel"
  std::string_view plan;
};

constexpr std::array models = {
    Model{"arcee", "Arcee", "llama"},
    Model{"bert", "Bert", "bert"},
    Model{"camembert", "Camembert", "bert"},
    Model{"cohere", "Cohere", "llama"},
    Model{"deepseek_v2", "DeepseekV2", "moe"},
    Model{"deepseek_v3", "DeepseekV3", "moe"},
    Model{"distilbert", "DistilBert", "bert"},
    Model{"dots1", "Dots1", "moe"},
    Model{"electra", "Electra", "bert"},
    Model{"ernie4_5", "Ernie4_5", "llama"},
    Model{"exaone4", "Exaone4", "llama"},
    Model{"gemma", "Gemma", "llama"},
    Model{"gemma2", "Gemma2", "llama"},
    Model{"gemma3_text", "Gemma3", "llama"},
    Model{"glm", "Glm", "llama"},
    Model{"glm4", "Glm4", "llama"},
    Model{"glm4_moe", "Glm4Moe", "moe"},
    Model{"gpt_neox", "GPTNeoX", "gpt-neox"},
    Model{"gpt_neox_japanese", "GPTNeoXJapanese", "gpt-neox"},
    Model{"gpt_oss", "GptOss", "moe"},
    Model{"granite", "Granite", "llama"},
    Model{"granitemoe", "GraniteMoe", "moe"},
    Model{"helium", "Helium", "llama"},
    Model{"llama", "Llama", "llama"},
    Model{"llama4_text", "Llama4", "moe"},
    Model{"ministral", "Ministral", "llama"},
    Model{"mistral", "Mistral", "llama"},
    Model{"mixtral", "Mixtral", "moe"},
    Model{"nemotron", "Nemotron", "llama"},
    Model{"olmo", "Olmo", "llama"},
    Model{"olmo2", "Olmo2", "llama"},
    Model{"olmoe", "Olmoe", "moe"},
    Model{"phi", "Phi", "llama"},
    Model{"phi3", "Phi3", "llama"},
    Model{"phimoe", "Phimoe", "moe"},
    Model{"qwen2", "Qwen2", "llama"},
    Model{"qwen2_moe", "Qwen2Moe", "moe"},
    Model{"qwen3", "Qwen3", "llama"},
    Model{"qwen3_moe", "Qwen3Moe", "moe"},
    Model{"roberta", "Roberta", "bert"},
    Model{"seed_oss", "SeedOss", "llama"},
    Model{"smollm3", "SmolLM3", "llama"},
    Model{"stablelm", "StableLm", "llama"},
    Model{"starcoder2", "Starcoder2", "llama"},
    Model{"xlm-roberta", "XLMRoberta", "bert"},
};

const Model* by_type(std::string_view type) {
  const auto* found = std::find_if(models.begin(), models.end(), [&](const Model& m) { return m.type == type; });
  return found == models.end() ? nullptr : found;
}

const Model* by_architecture(std::string_view architecture) {
  const auto* found = std::find_if(models.begin(), models.end(), [&](const Model& m) {
    if (!architecture.starts_with(m.architecture)) return false;
    const std::string_view rest = architecture.substr(m.architecture.size());
    if (rest == "ForConditionalGeneration") return false;  // with a vision tower
    return rest.starts_with("For") || rest.starts_with("Model") || rest.starts_with("LMHead");
  });
  return found == models.end() ? nullptr : found;
}

// A value of config.json that a plan follows from, and which one.
struct Hint {
  std::string words;
  std::string_view plan;  // empty: not known
};

std::vector<Hint> hints_of(const ConfigObject& config) {
  std::vector<Hint> hints;
  const auto add = [&](std::string_view key, const std::string& value, const Model* model) {
    hints.push_back({fmt::format("\"{}\" {}", key, in_quotes(value)), model == nullptr ? "" : model->plan});
  };
  const Config* type = config.find("model_type");
  if (type != nullptr && type->is_string()) add("model_type", type->as_string(), by_type(type->as_string()));
  const Config* list = config.find("architectures");
  if (list == nullptr || !list->is_array()) return hints;
  for (const Config& item : list->as_array())
    if (item.is_string() && hints.size() < 16)
      add("architectures", item.as_string(), by_architecture(item.as_string()));
  return hints;
}

}  // namespace

std::string_view plan_for_model(const Config* model_config) {
  const auto refuse = [](const std::string& words) {
    throw Error(
        ErrorKind::argument,
        fmt::format("choosing a plan by config.json: {}; name one with --plan (bert, gpt-neox, llama, moe, or a "
                    "file)",
                    words));
  };
  if (model_config == nullptr) refuse("there is none beside the weights");
  if (!model_config->is_object()) refuse(fmt::format("it is {}, not an object", to_string(model_config->type())));

  const std::vector<Hint> hints = hints_of(model_config->as_object());
  if (hints.empty()) refuse("it has neither \"model_type\" nor \"architectures\"");
  const Hint* chosen = nullptr;
  for (const Hint& hint : hints) {
    if (hint.plan.empty()) continue;
    if (chosen != nullptr && chosen->plan != hint.plan)
      refuse(fmt::format("{} stands for the plan {}, {} for the plan {}", chosen->words, chosen->plan, hint.words,
                         hint.plan));
    if (chosen == nullptr) chosen = &hint;
  }
  if (chosen != nullptr) return chosen->plan;

  std::vector<std::string_view> said;
  said.reserve(hints.size());
  for (const Hint& hint : hints) said.push_back(hint.words);
  std::vector<std::string_view> known;
  known.reserve(models.size());
  for (const Model& model : models) known.push_back(model.type);
  refuse(fmt::format("it has {}, and the models that are known are {}", fmt::join(said, ", "), fmt::join(known, ", ")));
  return {};
}

}  // namespace muster
