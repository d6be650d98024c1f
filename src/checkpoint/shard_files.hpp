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

/// The key of a shard's facts: JSON text, {"version": 1, "rank": 2, "ranks": 4, "layout": "tp=2,pp=2,ep=1", "padded":
/// {NAME: [DIM, SIZE]}}.
inline constexpr std::string_view shard_metadata_key = "muster.shard";

struct ShardFacts {
  int rank = 0;
  int ranks = 0;
  PaddedSizes padded;
  std::optional<ParallelLayout> layout = {};  ///< none: it does not say
};
std::string shard_facts_text(const ShardFacts& facts);
/// Empty where the metadata has none (a shard that other hands made). Throws Error(corrupt | version).
std::optional<ShardFacts> parse_shard_facts(const Metadata& metadata);

}  // namespace muster
