// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shards as files: their names, and what stands in their metadata.
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
std::string shard_facts_text(const ShardFacts& facts);
/// Empty where the metadata has none (a shard that other hands made). Throws Error(corrupt | version).
std::optional<ShardFacts> parse_shard_facts(const Metadata& metadata);

inline constexpr std::string_view config_metadata_key = "muster.config";

/// Pure. Text under "muster.config" that is no JSON is a text like others.
Config config_from_metadata(const Metadata& metadata);

/// metadata_from_config(config_from_metadata(m)) == m, up to the white space of a config's text, and
/// config_from_metadata(metadata_from_config(c)) == c. Throws Error(argument) where a leaf is a tensor.
Metadata metadata_from_config(const Config& config);

// The states of a workspace as one thing: which job, which ranks, which generation.

/// What of a workspace is meant.
struct StateChoice {
  std::optional<int> rank = {};                  ///< this one alone
  std::optional<std::uint64_t> generation = {};  ///< none: the newest complete one
  std::string job = {};                          ///< how its nonce begins; empty: the only one that there is
};

/// A state that was chosen.
struct ChosenState {
  std::string path;
  int rank = 0;
  std::uint64_t generation = 0;
};

struct ChosenStates {
  std::string job;                  ///< 32 digits
  int world_size = 0;               ///< of the job
  std::vector<ChosenState> states;  ///< by rank
};

/// Whether a directory is a workspace: has its mark, or names that only a workspace has.
bool is_workspace_directory(const std::string& path);

/// The newest complete state of each rank, whatever its generation: for whoever wants to see what there is. Throws as
/// workspace::survey; Error(argument) where several jobs could be meant (they are named), Error(not_found) where there
/// is no such job, rank or generation.
ChosenStates choose_states(const std::string& workspace, const StateChoice& choice);

/// The newest generation of which all ranks have a complete state, or the one that is asked for: what together is a
/// model. Throws as choose_states; Error(not_found) where no generation is complete on all ranks (they are named).
ChosenStates choose_common_states(const std::string& workspace, const StateChoice& choice);

}  // namespace muster
