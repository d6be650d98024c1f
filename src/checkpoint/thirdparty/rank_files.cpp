// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/thirdparty/rank_files.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <map>
#include <unordered_set>

#include "muster/config.hpp"
#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/thirdparty/torch_weights.hpp"
#include "src/formats/safetensors.hpp"
#include "src/os/process.hpp"

namespace muster::thirdparty {
namespace {

namespace fs = std::filesystem;

constexpr int largest_number = 99'999;
constexpr std::string_view rank_field = "{rank}";
constexpr std::string_view part_field = "{part}";

std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || text[0] == '-' || number > largest_number) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

/// Extracts rank and part from a name by a pattern.
std::optional<std::pair<int, int>> match(std::string_view pattern, std::string_view name) {
  std::pair<int, int> numbers{-1, 0};
  while (!pattern.empty()) {
    const bool is_rank = pattern.starts_with(rank_field);
    if (is_rank || pattern.starts_with(part_field)) {
      const std::optional<int> number = take_number(name);
      if (!number) return std::nullopt;
      (is_rank ? numbers.first : numbers.second) = *number;
      pattern.remove_prefix(is_rank ? rank_field.size() : part_field.size());
      continue;
    }
    if (name.empty() || name[0] != pattern[0]) return std::nullopt;
    pattern.remove_prefix(1);
    name.remove_prefix(1);
  }
  return name.empty() && numbers.first >= 0 ? std::optional(numbers) : std::nullopt;
}

/// Returns the parts of each rank in order; every rank and every part must exist.
std::vector<std::vector<std::string>> ranks_in_order(const std::string& directory, std::string_view pattern,
                                                     const std::map<std::pair<int, int>, std::string>& files) {
  std::vector<std::vector<std::string>> ranks(static_cast<std::size_t>(files.rbegin()->first.first) + 1);
  for (const auto& [numbers, name] : files) {
    std::vector<std::string>& parts = ranks[static_cast<std::size_t>(numbers.first)];
    if (numbers.second != static_cast<int>(parts.size()))
      throw file_error(ErrorKind::not_found, "reading", directory,
                       fmt::format("part {} of rank {} does not exist ({})", parts.size(), numbers.first, pattern));
    parts.push_back(name);
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].empty())
      throw file_error(ErrorKind::not_found, "reading", directory,
                       fmt::format("the file of rank {} of {} does not exist ({})", rank, ranks.size(), pattern));
  return ranks;
}

std::optional<FoundCheckpoint> find_by_pattern(const std::string& directory, const std::vector<std::string>& names,
                                               std::string_view pattern) {
  std::map<std::pair<int, int>, std::string> files;
  for (const std::string& name : names) {
    const auto numbers = match(pattern, name);
    if (!numbers) continue;
    const auto [other, is_new] = files.try_emplace(*numbers, name);
    if (!is_new)
      throw file_error(ErrorKind::invalid_argument, "reading", directory,
                       fmt::format("{} and {} both belong to rank {}. Move one away", in_quotes(other->second),
                                   in_quotes(name), numbers->first));
  }
  if (files.empty()) return std::nullopt;
  FoundCheckpoint found{.kind = CheckpointKind::ranks, .path = directory};
  found.by_rank = ranks_in_order(directory, pattern, files);
  found.ranks = static_cast<int>(found.by_rank.size());
  return found;
}

/// Returns the layout in TensorRT-LLM's config.json; nullopt if the config is another program's.
std::optional<ParallelLayout> mapping_of(const Config& config, const std::string& directory) {
  const Config* mapping = config.is_object() ? config.find("mapping") : nullptr;
  if (mapping == nullptr || !mapping->is_object()) return std::nullopt;
  const auto size = [&](const char* name) {
    const Config* value = mapping->find(name);
    return value != nullptr && value->type() == Config::Type::integer ? static_cast<int>(value->as_int()) : 1;
  };
  if (size("cp_size") > 1)
    throw file_error(
        ErrorKind::unsupported, "reading", directory,
        fmt::format("the ranks share the context (cp_size {}), which Muster cannot read", size("cp_size")));
  return ParallelLayout{.tensor = size("tp_size"), .pipeline = size("pp_size")};
}

/// Returns the numbers of pipeline, expert and tensor-parallel ranks of the job, from the arguments in a file of
/// Megatron; zeros if it has none.
std::array<int, 3> sizes_of_job(const std::string& path) {
  if (!is_torch_file(path)) return {};
  const os::ReadableFile file = os::ReadableFile::open(path);
  const TorchArchive archive = open_torch_file(file);
  const formats::Pickle& pickle = archive.pickle();
  const auto arguments = pickle.find(pickle.root(), "args");
  const auto size = [&](const char* name) {
    const auto value = arguments ? pickle.find(*arguments, name) : std::nullopt;
    return static_cast<int>(std::min<std::uint64_t>(value ? pickle.count(*value).value_or(0) : 0, largest_number));
  };
  return {size("pipeline_model_parallel_size"), size("expert_model_parallel_size"), size("tensor_model_parallel_size")};
}

/// Megatron's arguments have the sizes of the job and the rank of the process that wrote the file. Programs that
/// convert checkpoints leave the process's rank at 0 in all files.
void check_place_of(const TorchArchive& archive, const ParallelLayout& layout, int rank, const std::string& path) {
  const formats::Pickle& pickle = archive.pickle();
  const auto arguments = pickle.find(pickle.root(), "args");
  const auto number = [&](std::string_view name) {
    const auto value = arguments ? pickle.find(*arguments, name) : std::nullopt;
    return value ? pickle.integer(*value) : std::nullopt;
  };
  const auto check = [&](std::string_view what, std::optional<std::int64_t> said, std::int64_t by_name) {
    if (!said || *said == by_name) return;
    throw file_error(ErrorKind::rank_mismatch, "reading", path,
                     fmt::format("the folder was renamed or swapped: the saved arguments have {} {}, and the names of "
                                 "the folders have {}. Restore the original names of the folders",
                                 what, *said, by_name));
  };
  check("tensor_model_parallel_size", number("tensor_model_parallel_size"), layout.tensor);
  if (layout.pipeline > 1)
    check("pipeline_model_parallel_size", number("pipeline_model_parallel_size"), layout.pipeline);
  const auto place = layout.coordinates(rank);
  check("tensor-parallel rank", number("tensor_model_parallel_rank"), place.tensor);
  check("pipeline stage", number("pipeline_model_parallel_rank"), place.pipeline);
  check("expert rank", number("expert_model_parallel_rank"), place.expert);
  const auto process = number("rank");
  if (!process || *process <= 0) return;
  check("tensor-parallel rank", *process % layout.tensor, place.tensor);
  const auto processes = number("world_size");
  const bool has_stages_outside = number("use_tp_pp_dp_mapping").value_or(0) == 0;
  if (processes && *processes > *process && *processes % layout.pipeline == 0 && has_stages_outside)
    check("pipeline stage", *process / (*processes / layout.pipeline), place.pipeline);
}

}  // namespace

std::optional<FoundCheckpoint> find_rank_files(const std::string& directory, const std::vector<std::string>& names,
                                               const std::string& pattern) {
  if (!pattern.empty()) {
    if (pattern.find(rank_field) == std::string::npos)
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("--file-pattern {}: {} is missing (example: 'rank{{rank}}.safetensors')",
                              in_quotes(pattern), rank_field));
    std::optional<FoundCheckpoint> found = find_by_pattern(directory, names, pattern);
    if (!found)
      throw file_error(ErrorKind::not_found, "reading", directory,
                       fmt::format("no file matches the pattern {}", in_quotes(pattern)));
    return found;
  }
  for (const std::string_view known : {"consolidated.{rank}.pth", "model-rank-{rank}-part-{part}.safetensors"})
    if (std::optional<FoundCheckpoint> found = find_by_pattern(directory, names, known)) return found;
  std::optional<FoundCheckpoint> found = find_by_pattern(directory, names, "rank{rank}.safetensors");
  std::optional<Config> config = found ? read_model_config(directory) : std::nullopt;
  const std::optional<ParallelLayout> mapping = config ? mapping_of(*config, directory) : std::nullopt;
  if (!mapping) return std::nullopt;
  if (mapping->ranks() != found->ranks)
    throw file_error(ErrorKind::not_found, "reading", directory,
                     fmt::format("config.json has {} ranks, and {} ranks are present", mapping->ranks(), found->ranks));
  found->layout = mapping;
  found->config = std::move(config);
  return found;
}

std::optional<FoundCheckpoint> find_megatron_ranks(const std::string& directory,
                                                   const std::vector<std::string>& folders) {
  constexpr std::string_view prefix = "mp_rank_";
  constexpr std::string_view file_name = "model_optim_rng.pt";
  std::map<std::array<int, 3>, std::string> ranks;  // pipeline, expert, tensor
  std::size_t fields = 0;
  std::error_code error;
  for (const std::string& name : folders) {
    if (!name.starts_with(prefix) || !fs::exists(fs::path(directory) / name / file_name, error)) continue;
    std::string_view rest = std::string_view(name).substr(prefix.size());
    std::vector<int> numbers;
    while (numbers.size() < 3) {
      const std::optional<int> number = take_number(rest);
      if (!number) break;
      numbers.push_back(*number);
      if (!rest.starts_with('_')) break;
      rest.remove_prefix(1);
    }
    if (numbers.empty() || !rest.empty()) continue;
    if (fields != 0 && fields != numbers.size())
      throw file_error(ErrorKind::invalid_argument, "reading", directory,
                       "the folders of ranks belong to two jobs. Move one set away");
    fields = numbers.size();
    numbers.resize(3);
    ranks[{numbers[1], numbers[2], numbers[0]}] = join_path(name, std::string(file_name));
  }
  if (ranks.empty()) return std::nullopt;
  // If the file of the last rank is the missing one, the names alone would not show it.
  std::array<int, 3> sizes = sizes_of_job(join_path(directory, ranks.begin()->second));
  // With two numbers, the second one is an expert rank if there are no stages.
  if (fields == 2 && sizes[0] <= 1 && sizes[1] > 1) {
    std::map<std::array<int, 3>, std::string> of_experts;
    for (const auto& [place, file] : ranks) of_experts[{0, place[0], place[2]}] = file;
    ranks = std::move(of_experts);
  }
  if (fields == 1) sizes[0] = sizes[1] = 1;
  for (const auto& [place, folder] : ranks)
    for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = std::max(sizes[i], place[i] + 1);
  FoundCheckpoint found{.kind = CheckpointKind::ranks, .path = directory};
  found.layout = ParallelLayout{.tensor = sizes[2], .pipeline = sizes[0], .expert = sizes[1]};
  for (int p = 0; p < sizes[0]; ++p)
    for (int e = 0; e < sizes[1]; ++e)
      for (int t = 0; t < sizes[2]; ++t) {
        const auto folder = ranks.find({p, e, t});
        if (folder == ranks.end())
          throw file_error(ErrorKind::not_found, "reading", directory,
                           fmt::format("the file of tensor-parallel rank {}, stage {}, expert rank {} does not exist "
                                       "({} of {} ranks are present). Copy its folder as well",
                                       t, p, e, ranks.size(), std::int64_t{sizes[0]} * sizes[1] * sizes[2]));
        found.by_rank.push_back({folder->second});
      }
  found.ranks = static_cast<int>(found.by_rank.size());
  return found;
}

std::shared_ptr<const PartedTensors> open_rank_files(const FoundCheckpoint& found, int rank, const Choice& choice) {
  auto tensors = std::make_shared<PartedTensors>();
  std::unordered_set<std::string> names;
  const auto add_name = [&](const std::string& name) {
    if (!names.insert(name).second)
      throw Error(ErrorKind::corrupt, fmt::format("rank {}: tensor {}: the name is duplicated", rank, in_quotes(name)));
  };
  for (const std::string& name : found.by_rank[static_cast<std::size_t>(rank)]) {
    const std::string path = join_path(found.path, name);
    if (is_torch_file(path)) {
      add_torch_file(*tensors, path, choice, add_name, [&](const TorchArchive& archive) {
        if (found.layout) check_place_of(archive, *found.layout, rank, path);
      });
      continue;
    }
    const std::uint32_t file = tensors->add_file(path);
    const SafetensorsHeader header = read_safetensors_header(tensors->file(file));
    with_file("reading", path, [&] {
      for (const TensorEntry& entry : header.tensors) {
        add_name(entry.name);
        tensors->add_plain(entry, file);
      }
    });
  }
  tensors->finish();
  return tensors;
}

}  // namespace muster::thirdparty
