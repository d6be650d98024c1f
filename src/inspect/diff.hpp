// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster diff` says of two files, model directories, workspaces or directories with the shards of ranks.

#include <cstdint>
#include <string>
#include <vector>

#include "src/inspect/elements.hpp"
#include "src/inspect/source.hpp"

namespace muster::inspect {

/// How a tensor or a file differs.
inline constexpr std::string_view only_in_a = "only in A";
inline constexpr std::string_view only_in_b = "only in B";
inline constexpr std::string_view other_type = "type";
inline constexpr std::string_view other_values = "values";

struct TensorDiff {
  std::string name;
  std::string_view kind = other_values;
  TensorEntry a = {};  ///< without a name if it is not there
  TensorEntry b = {};
  ValueDifference values = {};  ///< where these are other ones
};

/// A file that is carried along. JSON is compared as values: order of members and white space do not count.
struct FileDiff {
  std::string name;
  std::string_view kind = other_values;
  std::string detail = {};  ///< where, and what on both sides
};

/// A place where two configs differ.
struct ConfigDiff {
  std::string place;  ///< "layers[0].hidden_size"; empty: the whole
  std::string a;      ///< JSON, shortened; empty: nothing is there
  std::string b;
};

struct DiffReport {
  std::string a;
  std::string b;
  std::uint64_t tensors = 0;                  ///< compared by value
  std::uint64_t bytes = 0;                    ///< of these, on one side
  std::uint64_t files = 0;                    ///< carried files on both sides
  std::vector<TensorDiff> tensor_diffs = {};  ///< not in b or of another type, other values, not in a
  std::vector<FileDiff> file_diffs = {};      ///< by name
  bool has_configs = false;                   ///< both sides have one, and one of them is a state
  std::vector<ConfigDiff> config_diffs = {};  ///< at most 1000
  std::uint64_t config_differences = 0;       ///< of these, and beyond
  bool metadata_differs = false;              ///< of the files' headers; told, but no difference: it names the writer

  [[nodiscard]] bool is_same() const noexcept {
    return tensor_diffs.empty() && file_diffs.empty() && config_differences == 0;
  }
};

/// Tensors by name, bit for bit, however they are spread over files; carried files if both are directories; configs
/// if a state is among them, a safetensors file's metadata being its config (shard_set.hpp). Memory is that of
/// a few pieces of some MiB. Shards and the states of ranks are merged by `options.plan` (a name, "auto", a file) while
/// they are read, each with its own directory's config.json. Throws like open_source; Error(rank_mismatch) if ranks
/// that must have the same values do not.
DiffReport diff_models(const std::string& a, const std::string& b, const SourceOptions& options = {});

/// A line for each difference and one for the whole. Lines end with '\n'.
std::string diff_text(const DiffReport& report);

/// {"same", "tensors", "bytes", "files", "config", "metadata_differs", "tensor_differences": [{"name", "kind", "a",
/// "b", "elements", ...}], "file_differences": [{"name", "kind", "detail"}], "config_differences": [{"place", "a",
/// "b"}], "config_differences_in_all"}; numbers that are not finite are strings.
Config diff_tree(const DiffReport& report);

}  // namespace muster::inspect
