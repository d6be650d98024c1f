// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster diff` says of two files, model directories, workspaces or directories with the shards of ranks.

#include <string>

#include "muster/config.hpp"
#include "src/inspect/source.hpp"

namespace muster::inspect {

/// Tensors by name, bit for bit, however they are spread over files; carried files if both are directories; configs
/// if a state is among them, a safetensors file's metadata being its config (shard_set.hpp). Memory is that of
/// a few pieces of some MiB. Shards and the states of ranks are merged by `options.plan` (a name, "auto", a file) while
/// they are read, each with its own directory's config.json. Throws like open_source; Error(rank_mismatch) if ranks
/// that must have the same values do not.
///
/// {"same", "a", "b", "tensors", "bytes", "files", "config", "metadata_differs", "tensor_differences": [{"name",
/// "kind", "a", "b", "values", "elements", "nans", "absolute", "relative"}], "file_differences": [{"name", "kind",
/// "detail"}], "config_differences": [{"place", "a", "b"}], "config_differences_in_all"} (docs/inspecting.md); numbers
/// that are not finite are strings. At most 1000 places of the config are listed.
Config diff_models(const std::string& a, const std::string& b, const SourceOptions& options = {});

/// The same for people: a line for each difference and one for the whole. Lines end with '\n'.
std::string diff_text(const Config& report);

}  // namespace muster::inspect
