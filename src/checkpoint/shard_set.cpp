// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/shard_set.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <system_error>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/state.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/core/quoted.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace {

// A file that somebody changed has another size or another time, whatever its name.
std::string identity_of(const std::string& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  const auto time = std::filesystem::last_write_time(path, error);
  return fmt::format("{} {} {}", std::filesystem::path(path).filename().string(), size,
                     time.time_since_epoch().count());
}

// That a process has open beside the shards.
constexpr std::uint64_t files_beside = 256;

std::optional<ParallelLayout> layout_said(const ShardListing& listing) {
  return listing.facts ? listing.facts->layout : std::nullopt;
}
PlanText plan_said(const ShardListing& listing) {
  return listing.facts ? listing.facts->plan : PlanText();
}

/// What a plan says, without comments and however it is written.
Config meaning_of(const std::string& plan_text) {
  Config plan = parse_json(plan_text);
  plan.as_object().erase("comment");
  for (const char* numbering : {"layers", "experts"})
    if (plan.contains(numbering) && plan[numbering].is_object()) plan[numbering].as_object().erase("comment");
  for (Config& rule : plan["rules"].as_array()) rule.as_object().erase("comment");
  return plan;
}

bool is_same_plan(const std::string& a, const std::string& b) {
  try {
    return a == b || meaning_of(a) == meaning_of(b);
  } catch (const Error&) {
    return false;  // a text that is no plan
  }
}

}  // namespace

RankTensors to_rank_tensors(ShardListing listing) {
  RankTensors tensors{std::move(listing.tensors), {}};
  if (!listing.facts) return tensors;
  tensors.padded = std::move(listing.facts->padded);
  tensors.heads = std::move(listing.facts->heads);
  tensors.is_ours = true;
  return tensors;
}

Config to_config(const ShardListing& listing) {
  ConfigArray tensors;
  tensors.reserve(listing.tensors.size());
  for (const NamedSpec& tensor : listing.tensors) {
    ConfigArray item;
    item.reserve(2 + tensor.spec.shape.size());
    item.emplace_back(tensor.name);
    item.emplace_back(static_cast<std::int64_t>(tensor.spec.dtype));
    for (const std::int64_t extent : tensor.spec.shape) item.emplace_back(extent);
    tensors.emplace_back(std::move(item));
  }
  return Config::object({{"rank", listing.rank},
                         {"tensors", std::move(tensors)},
                         {"facts", listing.facts ? Config(shard_facts_text(*listing.facts)) : Config()},
                         {"identity", listing.identity},
                         {"set", listing.set}});
}

ShardListing listing_from_config(const Config& config) {
  ShardListing listing{static_cast<int>(config.at("rank").as_int())};
  for (const Config& item : config.at("tensors").as_array()) {
    const ConfigArray& fields = item.as_array();
    const auto dtype = dtype_from_number(static_cast<std::uint8_t>(item.at(std::size_t{1}).as_int()));
    if (!dtype) throw Error(ErrorKind::corrupt, "a shard's listing has an unknown dtype");
    NamedSpec& tensor = listing.tensors.emplace_back(NamedSpec{item.at(std::size_t{0}).as_string(), {*dtype, {}}});
    for (std::size_t i = 2; i < fields.size(); ++i) tensor.spec.shape.push_back(fields[i].as_int());
  }
  if (const Config& facts = config.at("facts"); facts.is_string())
    listing.facts = parse_shard_facts({{std::string(shard_metadata_key), facts.as_string()}});
  listing.identity = config.at("identity").as_string();
  listing.set = config.at("set").as_string();
  return listing;
}

ParallelLayout layout_of(const std::vector<ShardListing>& listings, const std::optional<ParallelLayout>& given) {
  const auto count = static_cast<int>(listings.size());
  // Each process looks at the workspace by itself: one that goes on meanwhile shows them different things.
  for (const ShardListing& listing : listings)
    if (listing.set != listings.front().set)
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("the workspace changed meanwhile: rank {}'s state is of {}, rank {}'s of {}; try again, "
                              "or choose a generation",
                              listings.front().rank, listings.front().set, listing.rank, listing.set),
                  {.rank = listing.rank});
  if (given) {
    if (given->ranks() != count)
      throw Error(ErrorKind::argument, fmt::format("the layout {} is for {} ranks, and there are {} shards",
                                                   to_string(*given), given->ranks(), count));
    return *given;
  }
  const std::optional<ParallelLayout> said = layout_said(listings.front());
  for (const ShardListing& listing : listings)
    if (const auto other = layout_said(listing); other != said)
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("rank 0's shard was cut for the layout {}, rank {}'s for {}; they are not of one set",
                              said ? to_string(*said) : "(none)", listing.rank, other ? to_string(*other) : "(none)"),
                  {.rank = listing.rank});
  return said.value_or(ParallelLayout{.tensor = count});
}

MergePlan plan_of(const std::vector<ShardListing>& listings, const std::string& given, const Config* model_config,
                  std::vector<std::string>& notes) {
  const ShardListing& first = listings.front();
  const PlanText said = plan_said(first);
  for (const ShardListing& listing : listings)
    if (plan_said(listing) != said)
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("rank {}'s shard was not cut by the plan of rank {}'s; they are not of one set",
                              listing.rank, first.rank),
                  {.rank = listing.rank});
  if (given.empty()) {
    if (said.text.empty())
      throw Error(ErrorKind::argument,
                  "the shards do not say by which plan they were cut; name one with --plan: auto, a built-in plan's "
                  "name or a file");
    return MergePlan::parse(said.text, said.name, model_config);
  }
  MergePlan plan = MergePlan::load(given, model_config);
  if (!said.text.empty() && !is_same_plan(plan.text(), said.text))
    notes.push_back(fmt::format("the shards were cut by another plan ({}) than the given one ({}), which is used",
                                in_quotes(said.name), in_quotes(plan.name())));
  return plan;
}

ShardSet::ShardSet(const std::string& directory, int process, int processes, const workspace::StateChoice& choice) {
  if (workspace::is_workspace_directory(directory))
    open_states(directory, process, processes, choice);
  else
    open_files(directory, process, processes);
}

void ShardSet::open_files(const std::string& directory, int process, int processes) {
  count_ = count_shards(directory);
  os::allow_open_files(static_cast<std::uint64_t>(count_ / processes) + files_beside);
  for (int rank = process; rank < count_; rank += processes) {
    const SafetensorsFile file = SafetensorsFile::open(directory + "/" + shard_file_name(rank, count_));
    Shard shard{tensors_.size(), file};
    const PieceChecksums sums = piece_checksums_of(file);
    for (std::size_t i = 0; i < file.tensors().size(); ++i) shard.checked.push_back(checked_tensor(file, i, sums));
    add(std::move(shard), file, file.metadata(), rank, {});
  }
}

void ShardSet::open_states(const std::string& workspace, int process, int processes,
                           const workspace::StateChoice& choice) {
  const workspace::ChosenStates chosen = workspace::choose_common_states(workspace, choice);
  count_ = chosen.world_size;
  for (int rank = process; rank < count_; rank += processes) {
    const workspace::ChosenState& state = chosen.states[static_cast<std::size_t>(rank)];
    const StateFile file = StateFile::open(state.path);
    Metadata metadata = metadata_from_config(file.config());
    // A config of the user's own is none of a checkpoint's metadata.
    metadata.erase(std::string(config_metadata_key));
    Shard shard{tensors_.size()};
    shard.state = file;
    add(std::move(shard), file, metadata, rank, fmt::format("job {}, generation {}", chosen.job, state.generation));
  }
}

template <class File>
void ShardSet::add(Shard shard, const File& file, const Metadata& metadata, int rank, std::string set) {
  ShardListing listing{rank, {}, {}, identity_of(file.path()), std::move(set)};
  for (const auto& tensor : file.tensors()) {
    listing.tensors.push_back({tensor.name, {tensor.dtype, tensor.shape}});
    tensors_.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.bytes});
  }
  try {
    listing.facts = parse_shard_facts(metadata);
    if (listing.facts && (listing.facts->rank != rank || listing.facts->ranks != count_))
      throw Error(ErrorKind::corrupt, fmt::format("it says that it is rank {} of {}; it has been renamed or mixed up",
                                                  listing.facts->rank, listing.facts->ranks));
  } catch (const Error& error) {
    throw error.with_context(fmt::format("shard {}", in_quotes(file.path())));
  }
  if (listings_.empty()) {
    metadata_ = metadata;
    metadata_.erase(std::string(shard_metadata_key));
    metadata_.erase(std::string(piece_checksums_key));
  }
  listings_.push_back(std::move(listing));
  shards_.push_back(std::move(shard));
}

const ShardSet::Shard& ShardSet::shard_of(std::size_t tensor) const {
  return *std::prev(std::ranges::upper_bound(shards_, tensor, {}, &Shard::first));
}

TensorDetail ShardSet::detail(std::size_t tensor) const {
  const Shard& shard = shard_of(tensor);
  return {.file = shard.file ? shard.file->path() : shard.state->path(), .stored_bytes = tensors_[tensor].bytes};
}

void ShardSet::read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const {
  const Shard& shard = shard_of(tensor);
  const std::size_t index = tensor - shard.first;
  if (shard.state)
    shard.state->read(index, offset, target);
  else if (const auto& checked = shard.checked[index])
    checked->read(offset, target);
  else
    shard.file->read(index, offset, target);
}

}  // namespace muster
