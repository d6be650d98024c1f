// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/source.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <numeric>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/base/similar.hpp"
#include "src/checkpoint/assembly/export.hpp"
#include "src/checkpoint/assembly/shard_job.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/model_parts.hpp"
#include "src/checkpoint/thirdparty/hdf5/file.hpp"
#include "src/workspace/names.hpp"

namespace muster {
namespace {

template <class File>
SourceFile described(const File& file) {
  SourceFile out{file.path(), 0, file.tensors().size()};
  for (const auto& tensor : file.tensors()) out.bytes += tensor.bytes;
  return out;
}

Source source_of_model(const std::string& path, bool is_directory) {
  const ModelDir model = ModelDir::open(path);
  Source source{.path = path, .kind = is_directory ? "model" : "safetensors", .metadata = model.metadata()};
  for (const std::string& note : model.notes()) source.issues.push_back({"note", "", note});
  if (const std::string part = is_directory ? "" : words_of_part(path, model.metadata()); !part.empty())
    source.issues.push_back({"part", "", fmt::format("{}, not a complete model", part)});
  const auto tensors = std::make_shared<FileTensors>();
  tensors->add_omissions(model.omissions());
  for (const SafetensorsFile& file : model.files()) {
    source.files.push_back(described(file));
    tensors->add(file);
  }
  source.tensors = tensors;
  return source;
}

Source source_of_hdf5(const std::string& path, std::vector<SourceIssue> issues = {}) {
  const std::shared_ptr<const ForeignHdf5> file = ForeignHdf5::open(path);
  return {.path = path, .kind = "hdf5", .tensors = file, .metadata = file->metadata(), .issues = std::move(issues)};
}

Source source_of_state(const std::string& path, const StateFile& file) {
  const StateFileInfo& info = file.info();
  Source source{.path = path, .kind = "state", .files = {described(file)}, .states = {file}};
  const auto tensors = std::make_shared<FileTensors>();
  tensors->add(file);
  source.tensors = tensors;
  source.facts = {{"job", workspace::job_text(info.job)},
                  {"step", info.step},
                  {"rank", info.rank},
                  {"world_size", info.world_size},
                  {"format_version", file.format_version()},
                  {"file_bytes", file.file_bytes()}};
  return source;
}

/// h5repack and similar tools copy a commit mark that is wrong for the new file: it is then read like any other HDF5
/// file.
Source source_of_state_file(const std::string& path) {
  try {
    return source_of_state(path, StateFile::open(path));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::corrupt) throw;
    try {
      return source_of_hdf5(path, {{"incomplete", "", error.what()}});
    } catch (const Error&) {
      throw error;
    }
  }
}

/// Opens the selected states of a workspace, without a plan.
Source source_of_states(const std::string& path, const workspace::StateChoice& choice) {
  const workspace::ChosenStates chosen = workspace::choose_states(path, choice);
  if (chosen.world_size == 1 || choice.rank) return source_of_state(path, StateFile::open(chosen.states.front().path));
  Source source{.path = path, .kind = "workspace"};
  const auto tensors = std::make_shared<FileTensors>();
  source.tensors = tensors;
  ConfigArray steps;
  for (const workspace::ChosenState& state : chosen.states) {
    const StateFile& file = source.states.emplace_back(StateFile::open(state.path));
    source.files.push_back(described(file));
    tensors->add(file, fmt::format("rank{}/", file.info().rank));
    steps.emplace_back(file.info().step);
  }
  const StateFileInfo& first = source.states.front().info();
  source.facts = {{"job", workspace::job_text(first.job)},
                  {"ranks", source.states.size()},
                  {"world_size", first.world_size},
                  {"steps", std::move(steps)}};
  if (static_cast<std::size_t>(first.world_size) != source.states.size())
    tensors->add_omissions(
        {{"the other ranks",
          fmt::format("only {} of {} ranks have a complete state", source.states.size(), first.world_size), true}});
  for (const StateFile& file : source.states)
    if (file.info().step != first.step)
      source.issues.push_back({"step", "",
                               fmt::format("rank {} has step {}, rank {} has step {}", first.rank, first.step,
                                           file.info().rank, file.info().step)});
  return source;
}

Source source_of_foreign(const thirdparty::FoundCheckpoint& found, const std::string& path,
                         const SourceOptions& options) {
  Source source{.path = path, .kind = kind_name(found.kind)};
  std::vector<std::string> notes;
  const std::shared_ptr<const thirdparty::PartedTensors> tensors = open_checkpoint(found, 0, options.thirdparty, notes);
  source.tensors = tensors;
  for (const std::string& note : notes) source.issues.push_back({"note", "", note});
  return source;
}

/// Opens the shards of all ranks of a directory, or the states of a workspace that all ranks have. They are arranged by
/// the plan as in an export, and merged piece by piece.
Source source_of_shards(const std::string& directory, SourceOptions request) {
  request.path = directory;
  request.looks_only = true;
  ModelSource model = open_model(std::move(request));
  Source source{.path = directory, .kind = "shards", .tensors = model.tensors, .metadata = std::move(model.metadata)};
  if (model.plan)
    source.facts = {{"plan", model.plan->name()}, {"layout", to_string(model.layout)}, {"ranks", model.layout.ranks()}};
  for (const std::string& note : model.notes) source.issues.push_back({"note", "", note});
  return source;
}

/// Reports a missing path. The message for a dangling link names its target, because users see the link in the
/// directory.
[[noreturn]] void refuse_missing(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::read_symlink(path, error);
  if (!error)
    throw Error(ErrorKind::not_found,
                fmt::format("{}: a link to {}, which does not exist", in_quotes(path), in_quotes(target.string())),
                {.path = path, .os_error = ENOENT});
  throw Error(ErrorKind::not_found, fmt::format("{}: does not exist", in_quotes(path)),
              {.path = path, .os_error = ENOENT});
}

/// Returns `; did you mean "a.weight" or "b.weight"?` if some names are similar, or else the number of names.
std::string near_names(const std::vector<TensorEntry>& tensors, std::string_view name) {
  if (tensors.empty()) return ". It has no tensors.";
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorEntry& tensor : tensors) names.emplace_back(tensor.name);
  const std::string near = did_you_mean(name, names);
  return near.empty() ? fmt::format(". List its {} with muster ls.", counted(tensors.size(), "tensor")) : "; " + near;
}

/// Some tensors of another source.
class SelectedTensors : public TensorSource {
 public:
  SelectedTensors(std::shared_ptr<const TensorSource> source, std::vector<std::size_t> places)
      : source_(std::move(source)), places_(std::move(places)) {
    for (const std::size_t place : places_) entries_.push_back(source_->tensors()[place]);
  }
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override {
    source_->read(places_[tensor], offset, target);
  }
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override { return source_->detail(places_[tensor]); }
  [[nodiscard]] const Omissions& omissions() const noexcept override { return source_->omissions(); }

 private:
  std::shared_ptr<const TensorSource> source_;
  std::vector<std::size_t> places_;
  std::vector<TensorEntry> entries_;
};

}  // namespace

std::optional<Config> Source::config() const {
  if (kind == "model") return read_model_config(path);
  if (kind == "state") return states.front().config();
  // The converted form of a state's config.
  if (kind == "safetensors" && metadata.contains(std::string(config_metadata_key)))
    return config_from_converted(metadata);
  if (kind != "workspace") return std::nullopt;
  Config configs = Config::object();
  for (const StateFile& file : states) configs[fmt::format("rank{}", file.info().rank)] = file.config();
  return configs;
}

Source open_source(const std::string& path, const SourceOptions& options) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) refuse_missing(path);
  const PathContents contents = contents_of(path, options.thirdparty);
  const bool is_model = contents.kind == PathContents::Kind::model;
  if (options.dtype && !is_model && !contents.foreign && !contents.has_ranks())
    throw Error(
        ErrorKind::unsupported,
        fmt::format("{}: casting: only safetensors files, shards and third-party checkpoints can be cast. Leave "
                    "out --dtype, or convert the file to safetensors first",
                    in_quotes(path)),
        {.path = path});
  if (options.plan.empty() && !options.dtype) {
    if (contents.kind == PathContents::Kind::workspace) return source_of_states(path, options.states);
    if (contents.foreign && contents.foreign->ranks == 0) return source_of_foreign(*contents.foreign, path, options);
  }
  if (contents.foreign || contents.has_ranks() || options.dtype) return source_of_shards(path, options);
  if (std::filesystem::is_directory(status)) return source_of_model(path, true);
  if (StateFile::is_state_file(path)) return source_of_state_file(path);
  if (is_hdf5_file(path)) return source_of_hdf5(path);
  return source_of_model(path, false);
}

std::string omissions_line(const Source& source) {
  const Omissions& omissions = source.tensors->omissions();
  std::string line;
  if (const std::size_t lost = count_lost(omissions); lost != 0)
    line = fmt::format("{} cannot be read and {} not shown: {}. muster show --check has the reasons.\n",
                       counted(lost, source.kind == "hdf5" ? "dataset" : "item"), lost == 1 ? "is" : "are",
                       escaped(omission_words(omissions, true)));
  if (source.kind == "hdf5") return line;
  for (const std::string& note : omission_notes(omissions)) line += escaped(note) + "\n";
  return line;
}

bool has_selected_type(const TensorFilter& filter, DType dtype, std::uint64_t bytes) noexcept {
  const bool has_dtype = filter.dtypes.empty() || std::ranges::find(filter.dtypes, dtype) != filter.dtypes.end();
  return has_dtype && (filter.larger_than == 0 || bytes > filter.larger_than);
}

std::vector<std::size_t> matching(const Source& source, const TensorFilter& filter) {
  const std::vector<TensorEntry>& tensors = source.entries();
  std::vector<std::size_t> places(tensors.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  if (filter.is_all()) return places;
  if (!filter.select.empty()) {
    const TensorPattern select = TensorPattern::glob(filter.select);
    std::erase_if(places, [&](std::size_t place) { return !select.matches(tensors[place].name); });
    if (places.empty())
      throw Error(ErrorKind::not_found,
                  fmt::format("{}: no tensor name matches {}{}", in_quotes(source.path), in_quotes(filter.select),
                              near_names(tensors, filter.select)),
                  {.path = source.path});
  }
  if (!filter.exclude.empty()) {
    const TensorPattern exclude = TensorPattern::glob(filter.exclude);
    std::erase_if(places, [&](std::size_t place) { return exclude.matches(tensors[place].name); });
  }
  std::erase_if(places, [&](std::size_t place) {
    return !has_selected_type(filter, tensors[place].dtype, tensors[place].bytes);
  });
  return places;
}

void narrow(Source& source, const TensorFilter& filter) {
  if (filter.is_all()) return;
  source.tensors = std::make_shared<SelectedTensors>(source.tensors, matching(source, filter));
}

std::size_t find_tensor(const Source& source, std::string_view name) {
  if (const std::optional<std::size_t> place = source.tensors->find(name)) return *place;
  const Omissions& omissions = source.tensors->omissions();
  if (const auto lost = std::ranges::find(omissions, name, &Omission::name); lost != omissions.end())
    throw Error(ErrorKind::unsupported,
                fmt::format("{}: tensor {} cannot be read: {}", in_quotes(source.path), in_quotes(name), lost->reason),
                {.path = source.path});
  throw Error(
      ErrorKind::not_found,
      fmt::format("{}: no tensor {}{}", in_quotes(source.path), in_quotes(name), near_names(source.entries(), name)),
      {.path = source.path});
}

}  // namespace muster
