// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/plan/shard_metadata.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <utility>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"

namespace muster {

namespace {

/// Returns a number of a shard's facts.
std::int64_t number_from(const Config& value, std::int64_t least, std::int64_t most) {
  const std::int64_t number = value.as_int();
  if (number < least || number > most)
    throw Error(ErrorKind::corrupt,
                fmt::format("the number {} is out of range (valid: {} to {})", number, least, most));
  return number;
}

ShardFacts facts_of(const Config& json) {
  constexpr std::int64_t most_shards = 99'999;
  constexpr std::int64_t most_heads = 1 << 24;
  if (const std::int64_t version = json.at("version").as_int(); version != 1 && version != 2)
    throw Error(ErrorKind::version, fmt::format("unknown version {}. Use a newer Muster", version));
  ShardFacts facts{static_cast<int>(number_from(json.at("rank"), 0, most_shards)),
                   static_cast<int>(number_from(json.at("ranks"), 0, most_shards)),
                   {}};
  if (const Config* layout = json.find("layout")) {
    facts.layout = ParallelLayout::parse(layout->as_string());
    if (facts.layout->ranks() != facts.ranks)
      throw Error(ErrorKind::corrupt,
                  fmt::format("layout {} does not have {} ranks", in_quotes(layout->as_string()), facts.ranks));
  }
  for (const auto& [name, place] : json.at("padded").as_object())
    facts.padded.emplace(name, std::pair(static_cast<std::size_t>(number_from(place.at(std::size_t{0}), 0, INT64_MAX)),
                                         number_from(place.at(std::size_t{1}), 0, INT64_MAX)));
  if (const Config* plan = json.find("plan")) facts.plan = {plan->at("name").as_string(), plan->at("text").as_string()};
  if (const Config* heads = json.find("heads"))
    for (const auto& [name, counts] : heads->as_object()) {
      if (counts.as_array().empty())
        throw Error(ErrorKind::corrupt, fmt::format("the counts of heads of {} are missing", in_quotes(name)));
      for (const Config& count : counts.as_array()) facts.heads[name].push_back(number_from(count, 1, most_heads));
    }
  if (const Config* blocked = json.find("blocked"))
    for (const auto& [name, part] : blocked->as_object())
      facts.blocked[name] = {static_cast<std::size_t>(number_from(part.at(std::size_t{0}), 0, INT64_MAX)),
                             number_from(part.at(std::size_t{1}), 0, INT64_MAX),
                             number_from(part.at(std::size_t{2}), 1, INT64_MAX)};
  return facts;
}

constexpr std::string_view wrapper = "metadata";

/// Returns the texts of {"metadata": {NAME: TEXT, ...}}; nullopt if the tree has another form.
std::optional<Metadata> unwrapped(const Config& config) {
  if (!config.is_object() || config.size() != 1) return std::nullopt;
  const Config* inner = config.find(wrapper);
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

/// Whether a tree is written as JSON text. A tree that only wraps texts is not, unless those would be read as a tree.
bool is_written_as_text(const Config& config);

/// Returns the tree that is represented by metadata with only "muster.config".
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

std::string shard_facts_text(const ShardFacts& facts) {
  Config padded = ConfigObject();
  for (const auto& [name, place] : facts.padded) padded[name] = Config::array({place.first, place.second});
  // Version 0.1.0 would join the shared parts of several ranks one after the other.
  Config text = Config::object({{"version", facts.heads.empty() && facts.blocked.empty() ? 1 : 2},
                                {"rank", facts.rank},
                                {"ranks", facts.ranks}});
  if (facts.layout) text["layout"] = to_string(*facts.layout);
  if (!facts.plan.text.empty()) text["plan"] = Config::object({{"name", facts.plan.name}, {"text", facts.plan.text}});
  text["padded"] = std::move(padded);
  for (const auto& [name, counts] : facts.heads) text["heads"][name] = ConfigArray(counts.begin(), counts.end());
  for (const auto& [name, part] : facts.blocked)
    text["blocked"][name] = Config::array({part.dim, part.begin, part.block});
  return to_json(text);
}

std::optional<ShardFacts> parse_shard_facts(const Metadata& metadata) {
  const auto found = metadata.find(std::string(shard_metadata_key));
  if (found == metadata.end()) return std::nullopt;
  try {
    return facts_of(parse_json(found->second));
  } catch (const Error& error) {
    throw Error(error.kind() == ErrorKind::version ? ErrorKind::version : ErrorKind::corrupt,
                fmt::format("malformed metadata {}: {}", in_quotes(shard_metadata_key), error.what()));
  }
}

Config config_from_metadata(const Metadata& metadata) {
  if (metadata.empty()) return {};
  if (std::optional<Config> tree = tree_of(metadata)) return *std::move(tree);
  return wrapped(metadata);
}

Metadata metadata_for_conversion(const Config& config) {
  Metadata metadata = metadata_from_config(config);
  if (!config.is_null() && !metadata.contains(std::string(config_metadata_key))) return metadata;
  metadata.try_emplace(std::string(config_metadata_key), "null");
  metadata.emplace("format", "pt");
  return metadata;
}

Config config_from_converted(Metadata metadata) {
  const auto config = metadata.find(std::string(config_metadata_key));
  if (metadata.size() == 2 && config != metadata.end() && metadata.contains("format") &&
      metadata.at("format") == "pt") {
    if (config->second == "null") return {};
    metadata.erase("format");
  }
  return config_from_metadata(metadata);
}

Metadata metadata_from_config(const Config& config) {
  if (config.is_null()) return {};
  if (is_written_as_text(config)) return {{std::string(config_metadata_key), to_json(config)}};
  return *unwrapped(config);
}

}  // namespace muster
