// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/metadata_config.hpp"

#include <optional>

#include "muster/error.hpp"
#include "muster/state.hpp"

namespace muster {
namespace {

constexpr std::string_view wrapper = "metadata";

/// The texts of {"metadata": {NAME: TEXT, ...}}; none where the tree is not that.
std::optional<Metadata> unwrapped(const Config& config) {
  if (!config.is_object() || config.size() != 1) return std::nullopt;
  const Config* inner = config.as_object().find(wrapper);
  if (inner == nullptr || !inner->is_object() || inner->as_object().empty()) return std::nullopt;
  Metadata metadata;
  for (const auto& [name, text] : inner->as_object()) {
    if (!text.is_string()) return std::nullopt;
    metadata.emplace(name, text.as_string());
  }
  return metadata;
}

Config wrapped(const Metadata& metadata) {
  ConfigObject inner;
  for (const auto& [name, text] : metadata) inner.insert(name, Config(text));
  return Config::object({{wrapper, Config(std::move(inner))}});
}

std::optional<Config> parsed(const std::string& text) {
  try {
    return parse_json(text);
  } catch (const Error&) {
    return std::nullopt;
  }
}

/// Whether a tree is written as JSON text. A tree that wraps texts is not, unless those would be read as a tree.
bool is_written_as_text(const Config& config);

/// The tree that metadata of nothing but "muster.config" stands for.
std::optional<Config> tree_of(const Metadata& metadata) {
  if (metadata.size() != 1 || metadata.begin()->first != config_metadata_key) return std::nullopt;
  std::optional<Config> tree = parsed(metadata.begin()->second);
  return tree && is_written_as_text(*tree) ? tree : std::nullopt;
}

bool is_written_as_text(const Config& config) {
  if (config.is_null()) return false;
  const std::optional<Metadata> texts = unwrapped(config);
  return !texts || tree_of(*texts).has_value();
}

}  // namespace

Config config_from_metadata(const Metadata& metadata) {
  if (metadata.empty()) return {};
  if (std::optional<Config> tree = tree_of(metadata)) return *std::move(tree);
  return wrapped(metadata);
}

Metadata metadata_from_config(const Config& config) {
  if (config.is_null()) return {};
  if (is_written_as_text(config)) return {{std::string(config_metadata_key), to_json(config)}};
  return *unwrapped(config);
}

}  // namespace muster
