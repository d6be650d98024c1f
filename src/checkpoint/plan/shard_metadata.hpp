// SPDX-License-Identifier: Apache-2.0
#pragma once
// The metadata of a shard: how it was cut, for the export that merges it again. Also the conversion between metadata
// and the config of a state.

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "muster/config.hpp"
#include "muster/parallel_layout.hpp"
#include "src/checkpoint/plan/arrangement.hpp"

namespace muster {

/// The metadata of a safetensors file.
using Metadata = std::map<std::string, std::string>;

/// The key of a shard's facts: JSON text, {"version": 1, "rank": 2, "ranks": 4, "layout": "tp=2,pp=2,ep=1", "plan":
/// {"name": NAME, "text": JSON}, "padded": {NAME: [DIM, SIZE]}, "heads": {NAME: [COUNT, ...]}, "blocked": {NAME: [DIM,
/// BEGIN, BLOCK]}}. With "heads" or "blocked" the version is 2, which muster 0.1.0 refuses. That version wrote neither
/// these keys nor "plan".
inline constexpr std::string_view shard_metadata_key = "muster.shard";

/// A plan as recorded in a shard; empty: not recorded.
struct PlanText {
  std::string name;
  std::string text;
  friend bool operator==(const PlanText&, const PlanText&) = default;
};

/// The name of the plan for a model that is already whole.
inline constexpr std::string_view as_it_is = "as it is";

struct ShardFacts {
  int rank = 0;
  int ranks = 0;
  PaddedSizes padded;
  std::optional<ParallelLayout> layout = {};  ///< nullopt: not recorded
  PlanText plan = {};
  HeadCounts heads = {};
  BlockedParts blocked = {};

  /// Whether this is a whole model and not a shard.
  [[nodiscard]] bool is_whole() const noexcept { return plan.name == as_it_is; }
};
std::string shard_facts_text(const ShardFacts& facts);
/// Returns nullopt if the metadata has no facts (a shard that another program made). Throws Error(corrupt | version).
std::optional<ShardFacts> parse_shard_facts(const Metadata& metadata);

inline constexpr std::string_view config_metadata_key = "muster.config";

/// Pure. Text under "muster.config" that is not JSON is treated like any other text.
Config config_from_metadata(const Metadata& metadata);

/// metadata_from_config(config_from_metadata(m)) == m, up to the white space of a config's text, and
/// config_from_metadata(metadata_from_config(c)) == c. Throws Error(argument) if a leaf is a tensor.
Metadata metadata_from_config(const Config& config);

/// Returns the metadata of a file for other programs: as metadata_from_config, with {"format": "pt"} unless the config
/// is another file's metadata.
Metadata metadata_for_conversion(const Config& config);
/// Returns the config that metadata_for_conversion converted, or else config_from_metadata.
Config config_from_converted(Metadata metadata);

}  // namespace muster
