// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shards as files: their names, and what stands in their metadata.

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/checkpoint/arrangement.hpp"

namespace muster {

/// "rank-00002-of-00004.safetensors"
std::string shard_file_name(int rank, int ranks);

struct ShardName {
  int rank = 0;
  int ranks = 0;
};
/// Empty where the name is no shard's.
std::optional<ShardName> parse_shard_file_name(std::string_view name);

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
Config to_config(const HeadCounts& heads);
/// Throws Error(corrupt).
HeadCounts heads_from_config(const Config& config);
std::string shard_facts_text(const ShardFacts& facts);
/// Empty where the metadata has none (a shard that other hands made). Throws Error(corrupt | version).
std::optional<ShardFacts> parse_shard_facts(const Metadata& metadata);

}  // namespace muster
