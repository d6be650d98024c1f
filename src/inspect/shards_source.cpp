// SPDX-License-Identifier: Apache-2.0
// Shards of tensor-parallel ranks as one model: each name finds its rule, and the ranks' tensors of it are one.

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/checkpoint/quoted.hpp"
#include "src/checkpoint/shard_files.hpp"
#include "src/inspect/tensor_source.hpp"
#include "src/os/file.hpp"

namespace muster::inspect {
namespace {

constexpr std::uint64_t longest_config = std::uint64_t{16} << 20;
constexpr std::size_t most_names = 10;

std::optional<Config> read_model_config(const std::string& directory) {
  const std::string path = join_path(directory, "config.json");
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  const auto file = os::MappedFile::open(path);
  const std::span<const std::byte> bytes = file->bytes();
  try {
    if (bytes.size() > longest_config)
      throw Error(ErrorKind::corrupt, fmt::format("{} bytes are too many", bytes.size()));
    return parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } catch (const Error& cause) {
    throw Error(cause.kind(), fmt::format("reading {}: {}", in_quotes(path), cause.what()), {.path = path});
  }
}

struct Shards {
  std::vector<SafetensorsFile> files;
  std::vector<std::optional<ShardFacts>> facts;
};

Shards open_all(const std::string& directory) {
  Shards shards;
  const int count = count_shards(directory);
  for (int rank = 0; rank < count; ++rank) {
    const std::string path = join_path(directory, shard_file_name(rank, count));
    shards.files.push_back(SafetensorsFile::open(path));
    try {
      shards.facts.push_back(parse_shard_facts(shards.files.back().metadata()));
    } catch (const Error& cause) {
      throw cause.with_context(fmt::format("reading {}", in_quotes(path)));
    }
  }
  return shards;
}

/// One name on all ranks, by the plan.
class Merging {
 public:
  Merging(const MergePlan& plan, const Shards& shards) : plan_(plan), shards_(shards) {}

  /// None where the rule drops it.
  [[nodiscard]] std::optional<MergedTensor> merge(const std::string& name) const {
    const MergeRule& rule = *plan_.find(name);
    if (std::holds_alternative<DropAction>(rule.action)) return std::nullopt;
    MergedTensor merged{MergePlan::renamed(rule, name), {}, {}, {}, {}};
    std::vector<TensorSpec> specs;
    for (std::size_t rank = 0; rank < shards_.files.size(); ++rank) {
      const SafetensorsFile& file = shards_.files[rank];
      const auto index = file.find(name);
      if (!index)
        throw Error(
            ErrorKind::rank_mismatch,
            fmt::format("the tensor {}: rank {} of {} does not have it", in_quotes(name), rank, shards_.files.size()),
            {.rank = static_cast<int>(rank), .path = file.path()});
      merged.sources.push_back(file.tensor(*index));
      merged.ranks.push_back(static_cast<int>(rank));
      merged.files.push_back(file.path());
      specs.push_back({merged.sources.back().dtype(), merged.sources.back().shape()});
    }
    // There are no expert ranks here: all have the one part that there is.
    if (rule.across == Axis::expert) {
      for (std::size_t rank = 1; rank < specs.size(); ++rank) {
        if (specs[rank] != specs[0])
          throw Error(
              ErrorKind::rank_mismatch,
              fmt::format("the tensor {}: rank 0 has {}, rank {} has {}, and only expert ranks may differ in it",
                          in_quotes(name), to_string(specs[0]), rank, to_string(specs[rank])),
              {.rank = static_cast<int>(rank)});
        merged.equal.emplace_back(0, rank);
      }
      specs.resize(1);
    }
    const ResolvedMerge resolved = plan_.resolve(rule, name, specs);
    try {
      merged.layout = merge::join(resolved.merge, specs, true_size(name, resolved));
    } catch (const Error& cause) {
      throw cause.with_context(fmt::format("the tensor {}, rule {}", in_quotes(name), rule.number));
    }
    return merged;
  }

 private:
  [[nodiscard]] std::optional<std::int64_t> true_size(const std::string& name, const ResolvedMerge& resolved) const {
    for (const std::optional<ShardFacts>& facts : shards_.facts) {
      if (!facts || !std::holds_alternative<Concat>(resolved.merge)) continue;
      if (const auto padded = facts->padded.find(name); padded != facts->padded.end()) return padded->second.second;
    }
    return resolved.true_size;
  }

  const MergePlan& plan_;
  const Shards& shards_;
};

}  // namespace

bool is_shards_directory(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return false;
  bool has_shards = false;
  for (const std::string& name : files_in(path)) {
    if (is_index_name(name) || name == model_file_name) return false;
    has_shards = has_shards || parse_shard_file_name(name);
  }
  return has_shards;
}

std::unique_ptr<TensorSource> open_shards(const std::string& directory, const std::string& plan_name) {
  if (plan_name.empty())
    throw Error(ErrorKind::argument,
                fmt::format("reading {}: it has the shards of ranks, which are compared with --plan: auto, a built-in "
                            "plan's name or a file",
                            in_quotes(directory)),
                {.path = directory});
  const std::optional<Config> config = read_model_config(directory);
  const MergePlan plan = MergePlan::load(plan_name, config ? &*config : nullptr);
  const Shards shards = open_all(directory);

  std::map<std::string, bool> names;  // of all ranks
  for (const SafetensorsFile& file : shards.files)
    for (const TensorEntry& entry : file.tensors()) names.emplace(entry.name, true);
  std::string without;
  std::size_t count = 0;
  for (const auto& [name, there] : names) {
    if (plan.find(name) != nullptr) continue;
    if (count++ < most_names) without += (without.empty() ? "" : ", ") + in_quotes(name);
  }
  if (count != 0)
    throw Error(ErrorKind::argument,
                fmt::format("plan {}: no rule matches the tensors {}{}", in_quotes(plan.name()), without,
                            count > most_names ? fmt::format(" and {} more", count - most_names) : ""));

  std::vector<MergedTensor> merged;
  const Merging merging(plan, shards);
  for (const auto& [name, there] : names)
    if (std::optional<MergedTensor> tensor = merging.merge(name)) merged.push_back(std::move(*tensor));
  std::map<std::string, std::string> metadata = shards.files.front().metadata();
  metadata.erase(std::string(shard_metadata_key));
  return std::make_unique<MergedSource>(std::move(merged), std::move(metadata));
}

}  // namespace muster::inspect
