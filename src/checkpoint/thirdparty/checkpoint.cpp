// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/thirdparty/checkpoint.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/thirdparty/dcp.hpp"
#include "src/checkpoint/thirdparty/deepspeed.hpp"
#include "src/checkpoint/thirdparty/fsdp.hpp"
#include "src/checkpoint/thirdparty/rank_files.hpp"
#include "src/checkpoint/thirdparty/torch_weights.hpp"

namespace muster::thirdparty {
namespace {

namespace fs = std::filesystem;

std::string_view words_of_kind(CheckpointKind kind) noexcept {
  constexpr std::array<std::string_view, 7> words = {"a file of torch.save",
                                                     "a model in files of torch.save",
                                                     "a checkpoint of torch.distributed.checkpoint",
                                                     "a checkpoint of HuggingFaceStorageWriter",
                                                     "files of FSDP ranks",
                                                     "files of ranks",
                                                     "a checkpoint of DeepSpeed"};
  return words[static_cast<std::size_t>(kind)];
}

std::optional<FoundCheckpoint> find_torch_model(const std::string& directory, const std::vector<std::string>& names) {
  FoundCheckpoint found{.kind = CheckpointKind::torch_model, .path = directory};
  for (const std::string& name : names)
    if (name.starts_with("pytorch_model") && (name.ends_with(".bin") || name.ends_with(".bin.index.json")))
      found.files.push_back(name);
  if (found.files.empty()) return std::nullopt;
  return found;
}

std::vector<std::string> dcp_shard_files(const std::vector<std::string>& names) {
  std::vector<std::string> files;
  for (const std::string& name : names)
    if (name.starts_with("shard-") && is_weight_name(name)) files.push_back(name);
  return files;
}

/// Returns the newest iteration, which Megatron's directory of iterations records.
std::optional<std::string> newest_iteration(const std::string& directory, const std::vector<std::string>& names) {
  constexpr std::string_view tracker = "latest_checkpointed_iteration.txt";
  constexpr std::uint64_t longest_tracker = 64;
  if (std::ranges::find(names, tracker) == names.end()) return std::nullopt;
  const std::string path = join_path(directory, std::string(tracker));
  std::string text = read_text(path, longest_tracker);
  text.erase(std::remove_if(text.begin(), text.end(), [](char c) { return c == '\n' || c == ' ' || c == '\r'; }),
             text.end());
  // A model that was converted from another program belongs to no iteration.
  const bool is_release = text == "release";
  if (!is_release && (text.empty() || text.size() > 7 || text.find_first_not_of("0123456789") != std::string::npos))
    throw file_error(ErrorKind::corrupt, "reading", path, fmt::format("{} is not an iteration", in_quotes(text)));
  const std::string newest =
      join_path(directory, is_release ? text : "iter_" + std::string(7 - text.size(), '0') + text);
  std::error_code error;
  if (!fs::is_directory(newest, error))
    throw file_error(ErrorKind::not_found, "reading", path,
                     fmt::format("the recorded directory {} does not exist", in_quotes(newest)));
  return newest;
}

}  // namespace

std::string_view kind_name(CheckpointKind kind) noexcept {
  constexpr std::array<std::string_view, 7> names = {"torch", "torch", "dcp", "dcp", "fsdp", "ranks", "deepspeed"};
  return names[static_cast<std::size_t>(kind)];
}

std::optional<FoundCheckpoint> find_in_directory(const std::string& directory, const DirectoryNames& listed,
                                                 const Choice& choice) {
  const auto& [names, folders] = listed;
  if (const std::optional<std::string> newest = newest_iteration(directory, names))
    return find_in_directory(*newest, names_in(*newest), choice);
  std::vector<FoundCheckpoint> found;
  const auto add = [&](CheckpointKind kind, std::vector<std::string> files) {
    if (!files.empty()) found.push_back({.kind = kind, .path = directory, .files = std::move(files)});
  };
  add(CheckpointKind::dcp, dcp_metadata_files(names));
  add(CheckpointKind::dcp_shards, dcp_shard_files(names));
  add(CheckpointKind::fsdp, fsdp_files(directory, names));
  std::optional<FoundCheckpoint> ranks = find_rank_files(directory, names, choice.file_pattern);
  if (ranks && !choice.file_pattern.empty()) return ranks;
  if (ranks) found.push_back(*ranks);
  if (const auto megatron = find_megatron_ranks(directory, folders)) found.push_back(*megatron);
  if (const auto deepspeed = find_deepspeed(directory, names)) found.push_back(*deepspeed);
  const auto is_part = [](const std::string& name) { return name.ends_with(".distcp"); };
  if (found.empty() && std::ranges::any_of(names, is_part))
    throw file_error(ErrorKind::not_found, "reading", directory,
                     "incomplete checkpoint of torch.distributed.checkpoint: .metadata does not exist. The save was "
                     "interrupted. Use an earlier one");
  // Muster's own files take precedence over files in the older format that model hubs store next to them.
  const auto is_of_model = [&](const std::string& name) {
    if (!is_weight_name(name)) return is_index_name(name);
    const auto has_name = [&](const std::vector<std::string>& files) {
      return std::ranges::find(files, name) != files.end();
    };
    return std::ranges::none_of(found, [&](const FoundCheckpoint& one) {
      return has_name(one.files) || std::ranges::any_of(one.by_rank, has_name);
    });
  };
  const bool has_model = std::ranges::any_of(names, is_of_model);
  if (found.empty() && has_model) return std::nullopt;
  if (!has_model)
    if (const auto model = find_torch_model(directory, names)) found.push_back(*model);
  if (found.empty()) {
    check_deepspeed_tag(directory, names);
    return std::nullopt;
  }
  if (has_model || found.size() > 1) {
    const auto below = std::ranges::find_if(found, [&](const FoundCheckpoint& one) { return one.path != directory; });
    throw file_error(ErrorKind::invalid_argument, "reading", directory,
                     fmt::format("the directory has two checkpoints: {} and {}. {}", words_of_kind(found[0].kind),
                                 has_model ? "a model in safetensors files" : words_of_kind(found[1].kind),
                                 below == found.end() ? "Move one away"
                                                      : fmt::format("Pass {} to read that one, or move one away",
                                                                    in_quotes(below->path))));
  }
  return found[0];
}

std::optional<FoundCheckpoint> find_checkpoint(const std::string& path, const Choice& choice) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_directory(status)) return find_in_directory(path, names_in(path), choice);
  if (!fs::is_regular_file(status) || !is_torch_file(path)) return std::nullopt;
  return FoundCheckpoint{.kind = CheckpointKind::torch, .path = path};
}

std::shared_ptr<const PartedTensors> open_checkpoint(const FoundCheckpoint& found, int rank, const Choice& choice,
                                                     std::vector<std::string>& notes) {
  switch (found.kind) {
    case CheckpointKind::torch:
      return open_torch(found, choice);
    case CheckpointKind::torch_model:
      return open_torch_model(found, choice, notes);
    case CheckpointKind::dcp:
      return open_dcp(found, choice, notes);
    case CheckpointKind::dcp_shards:
      return open_dcp_shards(found);
    case CheckpointKind::fsdp:
      return open_fsdp(found, choice);
    case CheckpointKind::ranks:
      return open_rank_files(found, rank, choice);
    case CheckpointKind::deepspeed:
      return open_deepspeed(found, notes);
  }
  return {};
}

}  // namespace muster::thirdparty
