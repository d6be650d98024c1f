// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/shard_metadata.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

constexpr std::int64_t most_heads = 1 << 24;

[[noreturn]] void refuse_facts(const std::string& words) {
  throw Error(ErrorKind::corrupt, fmt::format("its metadata \"{}\" {}", shard_metadata_key, words));
}

int small_integer(const Config& facts, std::string_view key) {
  const Config* value = facts.find(key);
  if (value == nullptr || value->type() != Config::Type::integer || value->as_int() < 0 || value->as_int() > 99'999) {
    refuse_facts(fmt::format("has no whole number \"{}\"", key));
  }
  return static_cast<int>(value->as_int());
}

Config to_config(const HeadCounts& heads) {
  Config config = ConfigObject();
  for (const auto& [name, counts] : heads) {
    ConfigArray list;
    for (const std::int64_t count : counts) list.emplace_back(count);
    config[name] = std::move(list);
  }
  return config;
}

HeadCounts heads_from_config(const Config& config) {
  if (!config.is_object()) refuse_facts("has no object \"heads\"");
  HeadCounts heads;
  for (const auto& [name, list] : config.as_object()) {
    if (!list.is_array() || list.size() == 0)
      refuse_facts(fmt::format("has no counts of heads for {}", in_quotes(name)));
    for (const Config& count : list.as_array()) {
      if (count.type() != Config::Type::integer || count.as_int() < 1 || count.as_int() > most_heads)
        refuse_facts(fmt::format("has no counts of heads for {}", in_quotes(name)));
      heads[name].push_back(count.as_int());
    }
  }
  return heads;
}

constexpr std::string_view wrapper = "metadata";

/// The texts of {"metadata": {NAME: TEXT, ...}}; none where the tree is not that.
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

std::string shard_facts_text(const ShardFacts& facts) {
  Config padded = ConfigObject();
  for (const auto& [name, place] : facts.padded) {
    padded[name] = Config::array({static_cast<std::int64_t>(place.first), place.second});
  }
  // Version 0.1.0 would join heads that several ranks have one after the other.
  Config text =
      Config::object({{"version", facts.heads.empty() ? 1 : 2}, {"rank", facts.rank}, {"ranks", facts.ranks}});
  if (facts.layout) text["layout"] = to_string(*facts.layout);
  if (!facts.plan.text.empty()) text["plan"] = Config::object({{"name", facts.plan.name}, {"text", facts.plan.text}});
  text["padded"] = std::move(padded);
  if (!facts.heads.empty()) text["heads"] = to_config(facts.heads);
  return to_json(text);
}

std::optional<ShardFacts> parse_shard_facts(const Metadata& metadata) {
  const auto found = metadata.find(std::string(shard_metadata_key));
  if (found == metadata.end()) return std::nullopt;
  Config facts;
  try {
    facts = parse_json(found->second);
  } catch (const Error& error) {
    refuse_facts(fmt::format("is no JSON: {}", error.what()));
  }
  if (!facts.is_object()) refuse_facts("is no JSON object");
  if (const int version = small_integer(facts, "version"); version != 1 && version != 2) {
    throw Error(ErrorKind::version,
                fmt::format("its metadata \"{}\" has a version that this program does not know", shard_metadata_key));
  }
  ShardFacts read{small_integer(facts, "rank"), small_integer(facts, "ranks"), {}, {}};
  if (const Config* layout = facts.find("layout")) {
    if (!layout->is_string()) refuse_facts("has a \"layout\" that is no text");
    read.layout = ParallelLayout::parse(layout->as_string());
    if (read.layout->ranks() != read.ranks)
      refuse_facts(
          fmt::format("has the layout {}, which is not for {} ranks", in_quotes(layout->as_string()), read.ranks));
  }
  const Config* padded = facts.find("padded");
  if (padded == nullptr || !padded->is_object()) refuse_facts("has no object \"padded\"");
  for (const auto& [name, place] : padded->as_object()) {
    const bool good = place.is_array() && place.size() == 2 &&
                      std::all_of(place.as_array().begin(), place.as_array().end(), [](const Config& number) {
                        return number.type() == Config::Type::integer && number.as_int() >= 0;
                      });
    if (!good) refuse_facts(fmt::format("has no [dimension, size] for the tensor {}", in_quotes(name)));
    read.padded.emplace(name, std::pair(static_cast<std::size_t>(place.at(std::size_t{0}).as_int()),
                                        place.at(std::size_t{1}).as_int()));
  }
  if (const Config* plan = facts.find("plan")) {
    const Config* name = plan->find("name");
    const Config* text = plan->find("text");
    if (name == nullptr || text == nullptr || !name->is_string() || !text->is_string())
      refuse_facts("has a \"plan\" without name and text");
    read.plan = {name->as_string(), text->as_string()};
  }
  if (const Config* heads = facts.find("heads")) read.heads = heads_from_config(*heads);
  return read;
}

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
