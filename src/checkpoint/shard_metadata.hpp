// SPDX-License-Identifier: Apache-2.0
#pragma once
// What stands in the metadata of shards.
//
// The metadata of a safetensors file, which is texts by name, also becomes the config of a state file, which is a tree,
// and comes back. Both ways are one rule, so that either comes back as it was (JSON text in its shortest form):
//
//   no metadata                        null
//   {"muster.config": TEXT} alone      the tree of TEXT, where that tree would be written like this
//   any other                          {"metadata": {NAME: TEXT, ...}}

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/state_file.hpp"
#include "src/checkpoint/arrangement.hpp"

namespace muster {

/// The metadata of a safetensors file.
using Metadata = std::map<std::string, std::string>;

/// The key of a shard's facts: JSON text, {"version": 1, "rank": 2, "ranks": 4, "layout": "tp=2,pp=2,ep=1", "plan":
/// {"name": NAME, "text": JSON}, "padded": {NAME: [DIM, SIZE]}, "heads": {NAME: [COUNT, ...]}}. With "heads" the
/// version is 2, which muster 0.1.0 refuses; that wrote neither "plan" nor "heads".
inline constexpr std::string_view shard_metadata_key = "muster.shard";

/// A plan as a shard keeps it; empty: it does not say.
struct PlanText {
  std::string name;
  std::string text;
  friend bool operator==(const PlanText&, const PlanText&) = default;
};

struct ShardFacts {
  int rank = 0;
  int ranks = 0;
  PaddedSizes padded;
  std::optional<ParallelLayout> layout = {};  ///< none: it does not say
  PlanText plan = {};
  HeadCounts heads = {};
};
std::string shard_facts_text(const ShardFacts& facts);
/// Empty where the metadata has none (a shard that other hands made). Throws Error(corrupt | version).
std::optional<ShardFacts> parse_shard_facts(const Metadata& metadata);

inline constexpr std::string_view config_metadata_key = "muster.config";

/// Pure. Text under "muster.config" that is no JSON is a text like others.
Config config_from_metadata(const Metadata& metadata);

/// metadata_from_config(config_from_metadata(m)) == m, up to the white space of a config's text, and
/// config_from_metadata(metadata_from_config(c)) == c. Throws Error(argument) where a leaf is a tensor.
Metadata metadata_from_config(const Config& config);

}  // namespace muster
