// SPDX-License-Identifier: Apache-2.0
#pragma once
// The metadata of a safetensors file, which is texts by name, as the config of a state file, which is a tree; and back.
// Both ways are one rule, so that either comes back as it was (JSON text in its shortest form):
//
//   no metadata                        null
//   {"muster.config": TEXT} alone      the tree of TEXT, where that tree would be written like this
//   any other                          {"metadata": {NAME: TEXT, ...}}

#include <string>

#include "muster/config.hpp"
#include "src/checkpoint/shard_files.hpp"

namespace muster {

inline constexpr std::string_view config_metadata_key = "muster.config";

/// Pure. Text under "muster.config" that is no JSON is a text like others.
Config config_from_metadata(const Metadata& metadata);

/// metadata_from_config(config_from_metadata(m)) == m, up to the white space of a config's text, and
/// config_from_metadata(metadata_from_config(c)) == c. Throws Error(argument) where a leaf is a tensor.
Metadata metadata_from_config(const Config& config);

}  // namespace muster
