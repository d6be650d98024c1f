// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/model/model_parts.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <vector>

#include "muster/config.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/plan/shard_metadata.hpp"

namespace muster {
namespace {

namespace fs = std::filesystem;

/// Describes the part that the metadata of a shard, or of a file of torch.distributed.checkpoint, states.
std::string part_by_metadata(const std::map<std::string, std::string>& metadata) {
  try {
    if (const auto facts = parse_shard_facts(metadata); facts && facts->ranks > 1)
      return fmt::format("the shard of rank {} of {}", facts->rank, facts->ranks);
    const auto saved = metadata.find("DCP_SHARDING_INFO");
    if (saved == metadata.end()) return {};
    const Config tensors = parse_json(saved->second);
    for (const auto& [tensor, info] : tensors.as_object())
      for (const Config& offset : info.at("saved_offsets").as_array())
        if (offset.as_int() != 0) return "a part that torch.distributed.checkpoint saved";
  } catch (const Error&) {
    return {};  // the reader of the metadata reports this error
  }
  return {};
}

/// Replaces each run of digits in a name by one '#'.
std::string without_numbers(std::string_view name) {
  std::string form;
  for (const char letter : name) {
    const bool is_digit = letter >= '0' && letter <= '9';
    if (!is_digit)
      form += letter;
    else if (form.empty() || form.back() != '#')
      form += '#';
  }
  return form;
}

/// Returns whether the same directory has another name that differs only in its numbers.
bool has_siblings(const fs::path& path) {
  const std::string name = path.filename().string();
  const std::string form = without_numbers(name);
  const fs::path parent = path.parent_path();
  std::error_code error;
  for (fs::directory_iterator entry(parent.empty() ? "." : parent, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string other = entry->path().filename().string();
    if (other != name && without_numbers(other) == form) return true;
  }
  return false;
}

std::string part_by_name(const fs::path& path) {
  const std::string name = path.filename().string();
  if (const auto shard = parse_shard_file_name(name); shard && shard->ranks > 1)
    return fmt::format("the shard of rank {} of {}", shard->rank, shard->ranks);
  if (const auto numbered = parse_numbered_name(name); numbered && numbered->count > 1)
    return fmt::format("file {} of the {} files of a model", numbered->number, numbered->count);
  if (name.ends_with(".distcp")) return "a part that torch.distributed.checkpoint saved";
  constexpr std::array<std::string_view, 6> of_ranks = {"rank#.safetensors",
                                                        "model-rank-#-part-#.safetensors",
                                                        "shard-#-model-#-of-#.safetensors",
                                                        "model_world_size_#_rank_#.pt",
                                                        "consolidated.#.pth",
                                                        "mp_rank_#_model_states.pt"};
  const fs::path folder = fs::absolute(path).parent_path();
  const bool is_megatron = folder.filename().string().starts_with("mp_rank_") && has_siblings(folder);
  if (is_megatron || (std::ranges::find(of_ranks, without_numbers(name)) != of_ranks.end() && has_siblings(path)))
    return "the file of one rank";
  return {};
}

bool is_of_checkpoint(const std::string& name) {
  return is_weight_name(name) || is_index_name(name) || name == ".metadata" || name.ends_with(".distcp") ||
         name.ends_with(".pth") || (name.starts_with("pytorch_model") && name.ends_with(".bin")) ||
         name == "model_optim_rng.pt" || name.starts_with("zero_pp_rank_");
}

/// Adds the directories below `directory` that have a checkpoint to `found`. `below` is the path of `directory`
/// relative to the directory where the search began.
void find_below(const fs::path& directory, const std::string& below, int depth, std::size_t& budget,
                std::vector<std::string>& found) {
  constexpr int deepest = 3;
  std::vector<std::string> folders;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end && budget != 0;
       entry.increment(error)) {
    --budget;
    std::error_code status;
    const std::string name = entry->path().filename().string();
    if (entry->is_directory(status)) {
      folders.push_back(name);
    } else if (depth > 0 && is_of_checkpoint(name)) {
      // Megatron has a folder for each rank.
      const bool is_rank = directory.filename().string().starts_with("mp_rank_");
      const std::string whole = is_rank ? fs::path(below).parent_path().string() : below;
      if (!whole.empty() && (found.empty() || found.back() != whole)) found.push_back(whole);
      return;
    }
  }
  std::ranges::sort(folders);
  for (const std::string& name : folders)
    if (depth < deepest)
      find_below(directory / name, below.empty() ? name : below + "/" + name, depth + 1, budget, found);
}

}  // namespace

std::string words_of_part(const std::string& path, const std::map<std::string, std::string>& metadata) {
  const std::string part = part_by_metadata(metadata);
  return part.empty() && !path.empty() ? part_by_name(path) : part;
}

void refuse_part(const std::string& path, const std::map<std::string, std::string>& metadata) {
  if (const std::string part = words_of_part(path, metadata); !part.empty())
    throw file_error(ErrorKind::invalid_argument, "reading", path,
                     fmt::format("the file is {}, not a model. Pass the directory that has the complete model", part));
}

std::string hint_below(const std::string& directory) {
  constexpr std::size_t most_entries = 5000;
  constexpr std::size_t most_named = 3;
  std::size_t budget = most_entries;
  std::vector<std::string> found;
  find_below(directory, "", 0, budget, found);
  if (found.empty()) return {};
  std::string names;
  for (std::size_t i = 0; i < std::min(found.size(), most_named); ++i)
    names += (i == 0 ? "" : ", ") + in_quotes(found[i]);
  return fmt::format("; below it, {} {}{}. Pass one of these directories", names,
                     found.size() == 1 ? "has a checkpoint" : "have checkpoints",
                     found.size() > most_named ? " (among further ones)" : "");
}

}  // namespace muster
