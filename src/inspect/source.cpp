// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/source.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <numeric>

#include "muster/error.hpp"
#include "muster/plan.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/export.hpp"
#include "src/checkpoint/assembly/shard_job.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/model_parts.hpp"
#include "src/checkpoint/thirdparty/hdf5/file.hpp"
#include "src/inspect/output.hpp"
#include "src/workspace/names.hpp"

namespace muster::inspect {
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
    source.issues.push_back({"part", "", fmt::format("it is {}, not a model", part)});
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
                  {"generation", info.generation},
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
  ConfigArray generations;
  for (const workspace::ChosenState& state : chosen.states) {
    const StateFile& file = source.states.emplace_back(StateFile::open(state.path));
    source.files.push_back(described(file));
    tensors->add(file, fmt::format("rank{}/", file.info().rank));
    generations.emplace_back(file.info().generation);
  }
  const StateFileInfo& first = source.states.front().info();
  source.facts = {{"job", workspace::job_text(first.job)},
                  {"ranks", source.states.size()},
                  {"world_size", first.world_size},
                  {"generations", std::move(generations)}};
  if (static_cast<std::size_t>(first.world_size) != source.states.size())
    tensors->add_omissions(
        {{"the other ranks",
          fmt::format("complete states of {} of {} ranks are there", source.states.size(), first.world_size), true}});
  for (const StateFile& file : source.states)
    if (file.info().generation != first.generation)
      source.issues.push_back({"generation", "",
                               fmt::format("rank {} has generation {}, rank {} has {}", first.rank, first.generation,
                                           file.info().rank, file.info().generation)});
  return source;
}

Source source_of_foreign(const thirdparty::Found& found, const std::string& path, const SourceOptions& options) {
  Source source{.path = path, .kind = kind_name(found.kind)};
  std::vector<std::string> notes;
  const std::shared_ptr<const thirdparty::PartedTensors> tensors = open_checkpoint(found, 0, options.foreign, notes);
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
  for (const std::string& note : model.notes) source.issues.push_back({"note", "", note});
  return source;
}

/// Reports a dangling link: "No such file" would be confusing, because users see the name in the directory.
void refuse_dangling(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::read_symlink(path, error);
  if (!error)
    throw Error(ErrorKind::not_found,
                fmt::format("opening {}: it is a link to {}, which is not there", path, target.string()),
                {.path = path, .os_error = ENOENT});
}

constexpr std::size_t longest_compared = 200;
constexpr std::size_t most_compared = 20000;
constexpr std::size_t most_named = 3;

/// Returns the edit distance of two texts; `limit` if it is larger.
std::size_t edits(std::string_view a, std::string_view b, std::size_t limit) {
  if (a.size() > b.size()) std::swap(a, b);
  if (b.size() - a.size() >= limit) return limit;
  std::vector<std::size_t> row(a.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t j = 1; j <= b.size(); ++j) {
    std::size_t diagonal = std::exchange(row[0], j);
    std::size_t least = row[0];
    for (std::size_t i = 1; i <= a.size(); ++i) {
      const std::size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[i];
      row[i] = std::min({changed, row[i] + 1, row[i - 1] + 1});
      least = std::min(least, row[i]);
    }
    if (least >= limit) return limit;
  }
  return std::min(row.back(), limit);
}

/// Returns "; near it: "a.weight", "b.weight"" if some names are similar, or else the number of names, for messages.
std::string near_names(const std::vector<TensorEntry>& tensors, std::string_view name) {
  if (tensors.empty()) return "; there are no tensors";
  std::vector<std::pair<std::size_t, std::size_t>> near;  // distance, index
  const std::size_t limit = std::min(name.size(), longest_compared) / 3 + 2;
  for (std::size_t i = 0; i < std::min(tensors.size(), most_compared) && name.size() <= longest_compared; ++i) {
    const std::string_view other = tensors[i].name;
    if (other.size() > longest_compared) continue;
    // The end or the middle of a name counts as similar, too.
    const std::size_t distance =
        name.size() >= 3 && other.find(name) != std::string_view::npos ? 1 : edits(name, other, limit);
    if (distance < limit) near.emplace_back(distance, i);
  }
  if (near.empty()) return fmt::format("; there are {} others (muster ls, muster show)", tensors.size());
  std::ranges::sort(near);
  std::string list;
  for (std::size_t i = 0; i < std::min(near.size(), most_named); ++i)
    list += fmt::format("{}{}", i == 0 ? "" : ", ", in_quotes(tensors[near[i].second].name));
  return fmt::format("; near it: {}", list);
}

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
  if (!std::filesystem::exists(status)) refuse_dangling(path);
  const Contents contents = contents_of(path, options.foreign);
  if (options.plan.empty()) {
    if (contents.kind == Contents::Kind::workspace) return source_of_states(path, options.states);
    if (contents.foreign && contents.foreign->ranks == 0) return source_of_foreign(*contents.foreign, path, options);
  }
  if (contents.foreign || contents.has_ranks()) return source_of_shards(path, options);
  if (std::filesystem::is_directory(status)) return source_of_model(path, true);
  if (StateFile::is_state_file(path)) return source_of_state_file(path);
  if (is_hdf5_file(path)) return source_of_hdf5(path);
  return source_of_model(path, false);
}

std::string omissions_line(const Source& source) {
  const Omissions& omissions = source.tensors->omissions();
  std::string line;
  if (const std::size_t lost = count_lost(omissions); lost != 0)
    line = fmt::format("{} cannot be read and {} not shown: {}; muster show --issues has the reasons\n",
                       counted(lost, source.kind == "hdf5" ? "dataset" : "item"), lost == 1 ? "is" : "are",
                       escaped(omission_words(omissions, true)));
  if (source.kind == "hdf5") return line;
  for (const std::string& note : omission_notes(omissions)) line += escaped(note) + "\n";
  return line;
}

std::vector<std::size_t> matching(const Source& source, const std::string& pattern) {
  const std::vector<TensorEntry>& tensors = source.entries();
  std::vector<std::size_t> places(tensors.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  if (pattern.empty()) return places;
  const TensorPattern glob = TensorPattern::glob(pattern);
  std::erase_if(places, [&](std::size_t place) { return !glob.matches(tensors[place].name); });
  if (places.empty())
    throw Error(ErrorKind::not_found,
                fmt::format("no tensor's name matches {}{}", in_quotes(pattern), near_names(tensors, pattern)));
  return places;
}

std::size_t find_tensor(const Source& source, std::string_view name) {
  if (const std::optional<std::size_t> place = source.tensors->find(name)) return *place;
  const Omissions& omissions = source.tensors->omissions();
  if (const auto lost = std::ranges::find(omissions, name, &Omission::name); lost != omissions.end())
    throw Error(ErrorKind::unsupported,
                fmt::format("{} of {} cannot be read: {}", in_quotes(name), in_quotes(source.path), lost->reason),
                {.path = source.path});
  throw Error(
      ErrorKind::not_found,
      fmt::format("{} has no tensor {}{}", in_quotes(source.path), in_quotes(name), near_names(source.entries(), name)),
      {.path = source.path});
}

}  // namespace muster::inspect
