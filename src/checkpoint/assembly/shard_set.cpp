// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/shard_set.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <set>
#include <system_error>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/export.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/model_parts.hpp"
#include "src/checkpoint/model/model_survey.hpp"
#include "src/checkpoint/thirdparty/saved_config.hpp"
#include "src/formats/file_kind.hpp"
#include "src/os/process.hpp"

namespace muster {

namespace {

// A file that was changed has another size or time, even under the same name.
std::string identity_of(const std::string& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  const auto time = std::filesystem::last_write_time(path, error);
  return fmt::format("{} {} {}", std::filesystem::path(path).filename().string(), size,
                     time.time_since_epoch().count());
}

constexpr std::string_view as_it_is_plan = R"({"muster_plan": 1, "rules": [{"match": "*", "action": "same"}]})";

ShardFacts facts_of_whole() {
  ShardFacts facts{.rank = 0, .ranks = 1, .padded = {}};
  facts.plan = {std::string(as_it_is), std::string(as_it_is_plan)};
  return facts;
}

// Descriptors that a process needs in addition to those of the shards.
constexpr std::uint64_t files_beside = 256;

}  // namespace

void FileTensors::add(const SafetensorsFile& file, const PieceChecksums& sums) {
  OpenedFile& added = files_.emplace_back(OpenedFile{tensors_.size(), file});
  for (std::size_t i = 0; i < file.tensors().size(); ++i) added.checked.push_back(checked_tensor(file, i, sums));
  tensors_.insert(tensors_.end(), file.tensors().begin(), file.tensors().end());
}

void FileTensors::add(const StateFile& file, const std::string& prefix) {
  files_.push_back({tensors_.size(), file});
  for (const StateTensor& tensor : file.tensors())
    tensors_.push_back({prefix + tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.bytes});
}

void FileTensors::add_omissions(const Omissions& more) {
  const std::size_t before = omissions_.size();
  for (const Omission& omission : more) {
    const auto is_same = [&](const Omission& other) {
      return other.name == omission.name && other.reason == omission.reason;
    };
    if (std::none_of(omissions_.begin(), omissions_.begin() + static_cast<std::ptrdiff_t>(before), is_same))
      omissions_.push_back(omission);
  }
}

void FileTensors::add(std::shared_ptr<const TensorSource> source) {
  const std::vector<TensorEntry>& entries = source->tensors();
  add_omissions(source->omissions());
  const std::size_t first = tensors_.size();
  tensors_.insert(tensors_.end(), entries.begin(), entries.end());
  files_.push_back({first, std::move(source)});
}

std::pair<const FileTensors::OpenedFile*, std::size_t> FileTensors::place_of(std::size_t tensor) const {
  const OpenedFile& file = *std::prev(std::ranges::upper_bound(files_, tensor, {}, &OpenedFile::first));
  return {&file, tensor - file.first};
}

void FileTensors::read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const {
  const auto [file, index] = place_of(tensor);
  if (!file->checked.empty() && file->checked[index]) return file->checked[index]->read(offset, target);
  if (const auto* const source = std::get_if<std::shared_ptr<const TensorSource>>(&file->file))
    return (*source)->read(index, offset, target);
  if (const auto* const state = std::get_if<StateFile>(&file->file)) return state->read(index, offset, target);
  std::get<SafetensorsFile>(file->file).read(index, offset, target);
}

TensorDetail FileTensors::detail(std::size_t tensor) const {
  const auto [file, index] = place_of(tensor);
  if (const auto* const source = std::get_if<std::shared_ptr<const TensorSource>>(&file->file))
    return (*source)->detail(index);
  const StateFile* const state = std::get_if<StateFile>(&file->file);
  if (state == nullptr)
    return {.file = std::get<SafetensorsFile>(file->file).path(), .stored_bytes = tensors_[tensor].bytes};
  const StateTensor& entry = state->tensors()[index];
  return {state->path(), entry.stored_bytes, entry.compressed, entry.checksum};
}

PathContents contents_of(const std::string& path, const thirdparty::Choice& choice) {
  using Kind = PathContents::Kind;
  if (workspace::is_workspace_directory(path)) return {Kind::workspace};
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    if (auto found = thirdparty::find_checkpoint(path, choice)) return {Kind::foreign, std::move(found)};
    return {std::filesystem::is_regular_file(path, error) && is_weight_name(path) ? Kind::model : Kind::other};
  }
  const DirectoryNames names = names_in(path);
  if (auto found = thirdparty::find_in_directory(path, names, choice)) return {Kind::foreign, std::move(found)};
  const auto has = [&](auto is_one) { return std::ranges::any_of(names.files, is_one); };
  // A model next to shards is left to the survey of models, which refuses it.
  const bool has_model = has(is_index_name) || has([](const std::string& name) { return name == model_file_name; });
  if (!has_model && has([](const std::string& name) { return parse_shard_file_name(name).has_value(); }))
    return {Kind::shards};
  return {has_model || has(is_weight_name) ? Kind::model : Kind::other};
}

int count_shard_files(const std::string& directory) {
  const ShardSurvey survey = survey_shards(files_in(directory));
  refuse_findings(survey.findings, directory);
  if (survey.ranks == 0)
    throw file_error(
        ErrorKind::not_found, "reading", directory,
        fmt::format("no shards (rank-00000-of-0000N.safetensors) and no model found{}. Run muster shard to make shards",
                    hint_below(directory)));
  return survey.ranks;
}

ShardSet::ShardSet(const std::string& directory, int process, int processes, const workspace::StateChoice& choice,
                   const thirdparty::Choice& foreign, ModelReaders readers) {
  path_ = directory;
  PathContents contents = contents_of(directory, foreign);
  foreign_ = std::move(contents.foreign);
  if (contents.kind == PathContents::Kind::workspace) {
    open_states(directory, process, processes, choice);
  } else if (contents.kind == PathContents::Kind::foreign) {
    open_foreign(*foreign_, process, processes, foreign);
  } else if (contents.kind == PathContents::Kind::model) {
    if (process == 0 || readers == ModelReaders::all) open_model(directory, process, readers);
    count_ = 1;
  } else if (std::error_code error; std::filesystem::is_regular_file(directory, error)) {
    const std::string_view advice = formats::advice_about(formats::kind_of_file(os::ReadableFile::open(directory)));
    throw file_error(ErrorKind::invalid_argument, "reading", directory,
                     advice.empty() ? "the file is not a model. Convert an HDF5 file with muster convert"
                                    : fmt::format("the file is not a model but {}", advice));
  } else {
    open_files(directory, process, processes);
  }
  refuse_lost(omissions(), "reading", directory,
              "Run muster show --check for a list, and write them again in another form");
  for (const std::string& note : omission_notes(omissions())) notes_.push_back(note);
}

ExtraFiles ShardSet::carried(const std::string& carry) const {
  ExtraFiles carried = extra_files_of(path_, carry);
  if (foreign_ && foreign_->config && std::erase(carried.names, "config.json") != 0)
    carried.skipped.push_back({"config.json",
                               "a config of TensorRT-LLM, which programs that load the result cannot read. Pass "
                               "--base-model MODEL_DIR to copy the config of the model"});
  if (!foreign_ || !carry.empty()) return carried;
  std::erase_if(carried.names, [&](const std::string& name) {
    if (belongs_to_checkpoint(name) == Belongs::beside) return false;
    carried.skipped.push_back({name, "not a config, tokenizer or description of a model"});
    return true;
  });
  // Parts of the checkpoint itself are not omissions, because they have been read.
  std::set<std::string> parts;
  const auto add_part = [&](const std::filesystem::path& path) {
    parts.insert(path.lexically_normal().lexically_relative(std::filesystem::path(path_).lexically_normal()));
  };
  for (const std::string& file : foreign_->files) add_part(join_path(foreign_->path, file));
  for (const auto& rank : foreign_->by_rank)
    for (const std::string& file : rank) add_part(join_path(foreign_->path, file));
  for (const auto& tensors : parted_)
    for (const std::string& path : tensors->paths()) add_part(path);
  std::erase_if(carried.skipped, [&](const Omission& left) { return parts.contains(left.name); });
  std::ranges::sort(carried.skipped, {}, &Omission::name);
  return carried;
}

ModelFacts ShardSet::facts(const Request& request, std::vector<std::string>& notes) const {
  ModelFacts facts;
  // Another program's config.json is not in the format that Hugging Face's readers load.
  if (!request.base_model.empty() || !foreign_ || !foreign_->config) facts.config = config_of(request);
  facts.is_own = facts.config.has_value();
  if (!foreign_) return facts;
  if (!facts.is_own) facts.config = thirdparty::saved_config(*foreign_, notes);
  const Config saved = thirdparty::saved_facts(*foreign_);
  for (const auto& [key, value] : saved.as_object())
    if (facts.config && facts.config->is_object()) (*facts.config)[key] = value;
  return facts;
}

void ShardSet::check_stored() const {
  std::optional<std::string> first;
  for (const auto& tensors : parted_)
    tensors->verify_stored(share_.first, share_.second, [&](std::size_t, Defect, const std::string& words) {
      if (!first) first = words;
    });
  if (first) throw Error(ErrorKind::corrupt, *first, {.path = path_});
}

void ShardSet::open_foreign(const thirdparty::FoundCheckpoint& found, int process, int processes,
                            const thirdparty::Choice& choice) {
  if (found.kind == thirdparty::CheckpointKind::torch) refuse_part(found.path);
  count_ = std::max(found.ranks, 1);
  const bool is_whole = found.ranks == 0;
  if (is_whole) share_ = {process, processes};
  for (int rank = is_whole ? 0 : process; rank < count_; rank += processes) {
    std::vector<std::string> notes;
    const std::shared_ptr<const thirdparty::PartedTensors> tensors = open_checkpoint(found, rank, choice, notes);
    add(tensors);
    parted_.push_back(tensors);
    ShardListing listing{.rank = rank};
    for (const TensorEntry& entry : tensors->tensors())
      listing.tensors.push_back({entry.name, {entry.dtype, entry.shape}});
    for (const std::string& path : tensors->paths()) listing.identity += identity_of(path) + "\n";
    if (is_whole) whole_ = listing.identity;
    if (is_whole && process != 0) return;
    listing.layout = found.layout;
    // A whole model needs no plan, but may have one that renames.
    if (is_whole) listing.facts = facts_of_whole();
    for (std::string& note : notes)
      if (std::ranges::find(notes_, note) == notes_.end()) notes_.push_back(std::move(note));
    listings_.push_back(std::move(listing));
  }
}

void ShardSet::open_model(const std::string& directory, int process, ModelReaders readers) {
  const ModelDir model = ModelDir::open(directory);
  ShardListing listing{.rank = 0};
  os::allow_open_files(model.files().size() + files_beside);
  for (const SafetensorsFile& file : model.files()) {
    add(file);
    listing.identity += identity_of(file.path()) + "\n";
  }
  std::error_code error;
  if (!std::filesystem::is_directory(directory, error)) refuse_part(directory, model.metadata());
  add_omissions(model.omissions());
  notes_ = model.notes();
  for (const TensorEntry& entry : tensors()) listing.tensors.push_back({entry.name, {entry.dtype, entry.shape}});
  listing.facts = facts_of_whole();
  metadata_ = model.metadata();
  if (readers == ModelReaders::all) whole_ = listing.identity;
  if (process == 0) listings_.push_back(std::move(listing));
}

void ShardSet::open_files(const std::string& directory, int process, int processes) {
  count_ = count_shard_files(directory);
  if (process == 0) notes_ = notes_of(survey_shards(files_in(directory)).findings);
  os::allow_open_files(static_cast<std::uint64_t>(count_ / processes) + files_beside);
  for (int rank = process; rank < count_; rank += processes) {
    const SafetensorsFile file = SafetensorsFile::open(directory + "/" + shard_file_name(rank, count_));
    add(file, piece_checksums_of(file));
    list(file, file.metadata(), rank, {});
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
    // A config that the user stored does not belong to a checkpoint's metadata.
    metadata.erase(std::string(config_metadata_key));
    add(file);
    list(file, metadata, rank, fmt::format("job {}, step {}", chosen.job, state.step));
  }
}

template <class Opened>
void ShardSet::list(const Opened& file, const Metadata& metadata, int rank, std::string set) {
  ShardListing listing{rank, {}, {}, identity_of(file.path()), std::move(set)};
  for (const auto& tensor : file.tensors()) listing.tensors.push_back({tensor.name, {tensor.dtype, tensor.shape}});
  try {
    listing.facts = parse_shard_facts(metadata);
    if (listing.facts && (listing.facts->rank != rank || listing.facts->ranks != count_))
      throw Error(ErrorKind::corrupt, fmt::format("the file was renamed or swapped: its metadata records rank {} of {}",
                                                  listing.facts->rank, listing.facts->ranks));
  } catch (const Error& error) {
    throw error.with_context(fmt::format("{}: reading the shard", in_quotes(file.path())));
  }
  if (listings_.empty()) {
    metadata_ = metadata;
    metadata_.erase(std::string(shard_metadata_key));
    metadata_.erase(std::string(piece_checksums_key));
  }
  listings_.push_back(std::move(listing));
}

}  // namespace muster
