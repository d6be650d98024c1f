// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/model/model_survey.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <set>

#include "muster/config.hpp"
#include "muster/model_dir.hpp"
#include "muster/plan.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_parts.hpp"
#include "src/checkpoint/plan/model_config.hpp"
#include "src/formats/json_text.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace {

namespace fs = std::filesystem;

/// The prefix and the ending of the names in a numbered set: "model" and ".safetensors" for model-*.safetensors.
using SetKey = std::pair<std::string, std::string>;
struct NumberedSet {
  NumberedName first;
  std::set<std::uint64_t> numbers;
};
/// Sets by the number of files that their names state: N in model-00001-of-0000N.
using SetsByCount = std::map<std::uint64_t, NumberedSet>;

/// Returns the ranges of numbers that are missing in a set. Numbers start at 1, or at 0 if one file has the number 0.
std::vector<std::pair<std::uint64_t, std::uint64_t>> holes_of(const NumberedSet& set) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> holes;
  const std::uint64_t count = set.first.count;
  std::uint64_t next = set.numbers.contains(0) && !set.numbers.contains(count) ? 0 : 1;
  const std::uint64_t end = next + count;
  for (const std::uint64_t number : set.numbers) {
    if (number < next || number >= end) continue;
    if (number > next) holes.emplace_back(next, number - 1);
    next = number + 1;
  }
  if (next < end) holes.emplace_back(next, end - 1);
  return holes;
}

class FileChoice {
 public:
  FileChoice(const std::string& directory, const std::vector<std::string>& listing, const ModelNaming& naming)
      : naming_(naming), survey_{.directory = directory} {
    const std::string index_ending = std::string(naming.ending) + ".index.json";
    for (const std::string& name : listing) {
      if (name.ends_with(naming.ending))
        weights_.push_back(name);
      else if (name.ends_with(index_ending))
        indexes_.push_back(name);
      else if (name.find(std::string(naming.ending) + ".index.") != std::string::npos && name.ends_with(".json"))
        leave_out(name, "an index of another model");
    }
    std::ranges::sort(weights_);
  }

  ModelSurvey run() && {
    choose_index();
    if (survey_.index.empty())
      choose_by_names();
    else if (read_index() && !survey_.weights.empty())
      choose_by_index();
    refuse_shards();
    return std::move(survey_);
  }

 private:
  void refuse(ErrorKind kind, Defect defect, std::string_view file, std::string_view tensor, std::string words) {
    survey_.add(Severity::refused, kind, defect, file, tensor, std::move(words));
  }
  void refuse_index(ErrorKind kind, Defect defect, std::string_view file, std::string_view tensor,
                    const std::string& words) {
    refuse(kind, defect, file, tensor, fmt::format("index {}: {}", in_quotes(survey_.index), words));
  }
  void leave_out(const std::string& name, std::string reason) { survey_.left_out.push_back({name, std::move(reason)}); }
  [[nodiscard]] bool is_there(const std::string& name) const { return std::ranges::binary_search(weights_, name); }

  void choose_index() {
    const std::string usual = std::string(naming_.single) + ".index.json";
    if (indexes_.empty()) return;
    survey_.index = std::ranges::find(indexes_, usual) != indexes_.end() ? usual : indexes_.front();
    for (const std::string& other : indexes_) {
      if (other == survey_.index) continue;
      if (survey_.index == usual)
        leave_out(other, "an index of another model");
      else
        refuse(ErrorKind::invalid_argument, Defect::duplicate, other, "",
               fmt::format("{} and {} are both an index. Move one away", in_quotes(survey_.index), in_quotes(other)));
    }
  }

  /// Returns false if the index is damaged.
  bool read_index() {
    const std::string path = join_path(survey_.directory, survey_.index);
    Config index;
    try {
      index = core::parse_tolerantly(read_text(path, longest_index));
    } catch (const Error& error) {
      refuse_index(error.kind() == ErrorKind::io ? ErrorKind::io : ErrorKind::corrupt, Defect::index, survey_.index, "",
                   error.what());
      return false;
    }
    const Config* map = index.is_object() ? index.as_object().find("weight_map") : nullptr;
    if (map == nullptr || !map->is_object()) {
      refuse_index(ErrorKind::corrupt, Defect::index, survey_.index, "", "the object \"weight_map\" is missing");
      return false;
    }
    for (const auto& [tensor, file] : map->as_object()) {
      if (file.is_string() && is_name_beside(file.as_string())) {
        survey_.weights.emplace_back(tensor, file.as_string());
        continue;
      }
      refuse_index(ErrorKind::corrupt, Defect::index, survey_.index, tensor,
                   file.is_string()
                       ? fmt::format("tensor {} has the file {}, which is not the name of a file in the same directory",
                                     in_quotes(tensor), in_quotes(file.as_string()))
                       : fmt::format("tensor {}: the name of the file is not a string", in_quotes(tensor)));
    }
    if (map->as_object().empty())
      refuse_index(ErrorKind::corrupt, Defect::index, survey_.index, "",
                   "\"weight_map\" is empty. Copy the index again, or delete it if one file has all tensors");
    const Config* metadata = index.as_object().find("metadata");
    const Config* total =
        metadata != nullptr && metadata->is_object() ? metadata->as_object().find("total_size") : nullptr;
    if (total == nullptr) return true;
    // Some programs write it as a real number.
    if (total->type() == Config::Type::integer || total->type() == Config::Type::unsigned_integer ||
        total->type() == Config::Type::real)
      survey_.total_size = total->as_double();
    else
      survey_.add(Severity::flaw, ErrorKind::corrupt, Defect::index, survey_.index, "",
                  fmt::format("index {}: \"total_size\" is not a number", in_quotes(survey_.index)));
    return true;
  }

  void choose_by_index() {
    std::set<std::string> named;
    for (const auto& [tensor, file] : survey_.weights) named.insert(file);
    std::map<SetKey, SetsByCount> sets;
    for (const std::string& name : named) {
      survey_.names.push_back(name);
      std::error_code error;
      if (!is_there(name) && !fs::exists(fs::symlink_status(join_path(survey_.directory, name), error)))
        refuse_index(ErrorKind::not_found, Defect::missing, name, "",
                     fmt::format("{} does not exist. Copy that file as well", in_quotes(name)));
      add_to(sets, name);
    }
    // Two kinds of files contradict the index: further files of a set that it names, and a second model of the same
    // name. All other files belong to other models.
    const std::string stem = survey_.index.substr(0, survey_.index.find('.'));
    for (const std::string& name : weights_) {
      if (named.contains(name)) continue;
      const std::optional<NumberedName> numbered = parse_numbered_name(name);
      const auto set = numbered ? sets.find({numbered->prefix, numbered->ending}) : sets.end();
      if (set != sets.end()) {
        set->second[numbered->count].numbers.insert(numbered->number);
        set->second[numbered->count].first = *numbered;
        refuse_index(ErrorKind::corrupt, Defect::not_indexed, name, "",
                     fmt::format("{} is a file of the same set and has no entry. Copy the index again, or move the "
                                 "file away if it belongs to another model",
                                 in_quotes(name)));
      } else if (name == stem + std::string(naming_.ending)) {
        refuse_index(ErrorKind::invalid_argument, Defect::not_indexed, name, "",
                     fmt::format("{} has no entry, so the directory has two models. Move one away", in_quotes(name)));
      } else if (!parse_shard_file_name(name)) {
        leave_out(name, fmt::format("weights without an entry in {}", in_quotes(survey_.index)));
      }
    }
    for (const auto& [key, by_count] : sets) check_numbers(by_count, true);
  }

  static void add_to(std::map<SetKey, SetsByCount>& sets, const std::string& name) {
    const std::optional<NumberedName> numbered = parse_numbered_name(name);
    if (!numbered) return;
    NumberedSet& set = sets[{numbered->prefix, numbered->ending}][numbered->count];
    set.numbers.insert(numbered->number);
    set.first = *numbered;
  }

  /// Refuses a set whose names state different counts, have a number above the count, or lack a number.
  void check_numbers(const SetsByCount& by_count, bool is_indexed) {
    if (by_count.size() > 1) {
      std::vector<std::string> names;
      for (const auto& [count, set] : by_count) names.push_back(in_quotes(set.first.with(*set.numbers.begin())));
      refuse(
          ErrorKind::invalid_argument, Defect::numbering,
          by_count.begin()->second.first.with(*by_count.begin()->second.numbers.begin()), "",
          fmt::format("files of sets of different sizes: {}. Move all sets except one away", fmt::join(names, ", ")));
    }
    for (const auto& [count, set] : by_count) {
      for (const std::uint64_t number : set.numbers)
        if (number > count)
          refuse(ErrorKind::invalid_argument, Defect::numbering, set.first.with(number), "",
                 fmt::format("{}: the number is out of range (valid: 1 to {}). Copy the file with its original name",
                             in_quotes(set.first.with(number)), count));
      for (const auto& [begin, end] : holes_of(set)) {
        const std::string name = set.first.with(begin);
        if (begin == end && is_indexed && std::ranges::binary_search(survey_.names, name)) continue;
        refuse(ErrorKind::not_found, Defect::missing, name, "",
               begin == end
                   ? fmt::format("{} does not exist. Copy it from the same model", in_quotes(name))
                   : fmt::format("{} and the files up to number {} do not exist. Copy them from the same model",
                                 in_quotes(name), end));
      }
    }
  }

  void choose_by_names() {
    if (is_there(std::string(naming_.single))) return choose_single();
    std::map<SetKey, SetsByCount> sets;
    std::vector<std::string> models;
    std::vector<std::string> beside;
    for (const std::string& name : weights_) {
      if (parse_shard_file_name(name)) continue;
      if (is_beside_a_model(name))
        beside.push_back(name);
      else if (parse_numbered_name(name))
        add_to(sets, name);
      else
        models.push_back(name);
    }
    if (sets.empty() && models.empty()) {
      // Without any other weights, one of these files is the model.
      for (const std::string& name : beside)
        if (parse_numbered_name(name))
          add_to(sets, name);
        else
          models.push_back(name);
      beside.clear();
    }
    const SetKey usual{std::string(naming_.single.substr(0, naming_.single.find('.'))), std::string(naming_.ending)};
    const auto set = sets.contains(usual) ? sets.find(usual) : sets.begin();
    if (sets.contains(usual) || (sets.size() == 1 && models.empty())) {
      for (const std::string& name : weights_) {
        const auto numbered = parse_numbered_name(name);
        if (numbered && SetKey{numbered->prefix, numbered->ending} == set->first)
          survey_.names.push_back(name);
        else if (!parse_shard_file_name(name))
          leave_out(name,
                    fmt::format("weights next to the model {}",
                                in_quotes(survey_.names.empty() ? set->first.first + "-*" : survey_.names.front())));
      }
      check_numbers(set->second, false);
      survey_.add(
          Severity::flaw, ErrorKind::not_found, Defect::missing, std::string(naming_.single) + ".index.json", "",
          fmt::format(
              "{}.index.json does not exist, so loaders do not find the numbered files. Run muster export to write one",
              set->first.first + std::string(naming_.ending)));
    } else if (sets.empty() && models.size() == 1) {
      survey_.names = models;
      for (const std::string& name : beside)
        leave_out(name, fmt::format("weights next to {}", in_quotes(models.front())));
    } else if (!sets.empty() || !models.empty()) {
      for (const auto& [key, by_count] : sets) models.push_back(key.first + "-*" + key.second);
      const std::size_t count = models.size();
      refuse(ErrorKind::invalid_argument, Defect::not_indexed, models[1], "",
             fmt::format(
                 "{} different models and no index: {} and {}. Pass one file, move all models except one away, or, if "
                 "ranks have written them, pass --file-pattern 'rank{{rank}}.safetensors'",
                 count, in_quotes(models[0]), in_quotes(models[1])));
    } else if (std::ranges::none_of(weights_,
                                    [](const std::string& name) { return parse_shard_file_name(name).has_value(); })) {
      refuse(ErrorKind::not_found, Defect::missing, "", "",
             fmt::format("no *{} file found{}", naming_.ending, hint_below(survey_.directory)));
    }
  }

  void choose_single() {
    const std::string single(naming_.single);
    survey_.names = {single};
    const std::string prefix = single.substr(0, single.find('.'));
    for (const std::string& name : weights_) {
      if (name == single || parse_shard_file_name(name)) continue;
      const auto numbered = parse_numbered_name(name);
      if (numbered && numbered->prefix == prefix && numbered->ending == naming_.ending)
        refuse(ErrorKind::invalid_argument, Defect::not_indexed, name, "",
               fmt::format("{} and {} are two models in one directory. Move one away", in_quotes(single),
                           in_quotes(name)));
      else
        leave_out(name, fmt::format("weights next to {}", in_quotes(single)));
    }
  }

  /// Returns true for weights that repositories store in addition to a model: in Meta's format, of an adapter, or with
  /// another dtype.
  [[nodiscard]] bool is_beside_a_model(const std::string& name) const {
    if (name.starts_with("consolidated") || name.starts_with("adapter_model")) return true;
    // "model.fp16.safetensors" next to "model.safetensors".
    const std::string stem = name.substr(0, name.size() - naming_.ending.size());
    const std::size_t dot = stem.rfind('.');
    return dot != std::string::npos && is_there(stem.substr(0, dot) + std::string(naming_.ending));
  }

  void refuse_shards() {
    const auto shard =
        std::ranges::find_if(weights_, [](const std::string& name) { return parse_shard_file_name(name).has_value(); });
    if (shard == weights_.end() || std::ranges::binary_search(survey_.names, *shard)) return;
    if (survey_.names.empty() && survey_.findings.empty())
      refuse(ErrorKind::invalid_argument, Defect::numbering, *shard, "",
             "the directory has the shards of ranks, not a model. Merge them with muster export, or pass one file");
    else
      refuse(ErrorKind::invalid_argument, Defect::duplicate, *shard, "",
             fmt::format("a model and the shards of ranks ({}) are two checkpoints in one directory. Move one away",
                         in_quotes(*shard)));
  }

  const ModelNaming& naming_;
  ModelSurvey survey_;
  std::vector<std::string> weights_;
  std::vector<std::string> indexes_;
};

/// Returns whether total_size counts tied tensors several times, as some writers do.
bool is_sum_with_ties(double total, std::uint64_t bytes, const std::vector<std::uint64_t>& tied) {
  constexpr int most_repeats = 3;
  return std::ranges::any_of(tied, [&](std::uint64_t size) {
    for (int repeats = 1; repeats <= most_repeats; ++repeats)
      if (static_cast<double>(bytes + static_cast<std::uint64_t>(repeats) * size) == total) return true;
    return false;
  });
}

/// Returns whether the tensor may be tied: models tie heads and embeddings.
bool may_be_tied(std::string_view name) {
  return std::ranges::any_of(std::initializer_list<std::string_view>{"embed", "lm_head", "wte", "shared", "output"},
                             [&](std::string_view part) { return name.find(part) != std::string_view::npos; });
}

/// Checks the tensors against config.json. Commands that write also check them by the rules of their plan, and refuse a
/// contradiction.
void check_config(ModelSurvey& survey) {
  constexpr const char* any_plan = R"({"muster_plan": 1, "rules": [{"match": "*", "action": "same"}]})";
  try {
    const std::optional<Config> config = read_model_config(survey.directory);
    if (!config) return;
    std::vector<NamedSpec> tensors;
    for (const SurveyedFile& opened : survey.files)
      for (const TensorEntry& entry : opened.file.tensors())
        tensors.push_back({entry.name, {entry.dtype, entry.shape}});
    check_against_config(MergePlan::parse(any_plan, "any", &*config), tensors);
  } catch (const Error& error) {
    survey.add(Severity::flaw, error.kind(), Defect::mismatch, "config.json", "", error.what());
  }
}

}  // namespace

void refuse_findings(const Findings& findings, const std::string& directory) {
  const Finding* first = nullptr;
  std::size_t count = 0;
  for (const Finding& finding : findings) {
    if (finding.severity != Severity::refused) continue;
    if (first == nullptr) first = &finding;
    ++count;
  }
  if (first == nullptr) return;
  throw file_error(first->kind, "reading", directory,
                   count == 1
                       ? first->problem.message
                       : fmt::format("{} (and {} more: muster verify lists all)", first->problem.message, count - 1));
}

std::vector<std::string> notes_of(const Findings& findings) {
  std::vector<std::string> notes;
  for (const Finding& finding : findings)
    if (finding.severity == Severity::flaw) notes.push_back(finding.problem.message);
  return notes;
}

void ModelSurvey::add(Severity severity, ErrorKind kind, Defect defect, std::string_view file, std::string_view tensor,
                      std::string words) {
  findings.push_back({severity, kind, {defect, std::string(file), std::string(tensor), std::move(words)}});
}

bool ModelSurvey::is_refused() const noexcept {
  return std::ranges::any_of(findings, [](const Finding& finding) { return finding.severity == Severity::refused; });
}

ModelSurvey choose_files(const std::string& directory, const std::vector<std::string>& listing,
                         const ModelNaming& naming) {
  return FileChoice(directory, listing, naming).run();
}

void TensorPlaces::add(ModelSurvey& survey, const std::string& tensor, const std::string& file, std::uint64_t size) {
  bytes += size;
  if (may_be_tied(tensor)) tied.push_back(size);
  const auto [other, is_new] = file_of_tensor.try_emplace(tensor, file);
  if (!is_new)
    survey.add(Severity::refused, ErrorKind::corrupt, Defect::duplicate, file, tensor,
               fmt::format("tensor {} is duplicated: {} and {} have it. If ranks have written them, pass --plan and "
                           "--file-pattern 'rank{{rank}}.safetensors'",
                           in_quotes(tensor), in_quotes(other->second), in_quotes(file)));
}

void check_tensors(ModelSurvey& survey, const TensorPlaces& places) {
  const auto refuse_index = [&](Defect defect, std::string_view file, std::string_view tensor,
                                const std::string& words) {
    survey.add(Severity::refused, ErrorKind::corrupt, defect, file, tensor,
               fmt::format("index {}: {}", in_quotes(survey.index), words));
  };
  std::set<std::string_view> indexed;
  for (const auto& [tensor, file] : survey.weights) {
    indexed.insert(tensor);
    if (!places.files.contains(file)) continue;  // this file has its own finding
    const auto place = places.file_of_tensor.find(tensor);
    if (place != places.file_of_tensor.end() && place->second == file) continue;
    refuse_index(Defect::index, file, tensor,
                 fmt::format("tensor {} does not exist in {}; {}", in_quotes(tensor), in_quotes(file),
                             place == places.file_of_tensor.end() ? "no other file has it"
                                                                  : in_quotes(place->second) + " has it"));
  }
  if (!survey.index.empty())
    for (const auto& [tensor, file] : places.file_of_tensor)
      if (!indexed.contains(tensor))
        refuse_index(Defect::not_indexed, file, tensor,
                     fmt::format("tensor {} of {} has no entry", in_quotes(tensor), in_quotes(file)));
  if (survey.is_refused()) return;
  if (places.file_of_tensor.empty())
    survey.add(Severity::refused, ErrorKind::not_found, Defect::missing, "", "",
               "the files have no tensors. Copy them again");
  if (survey.total_size && places.bytes != 0 && *survey.total_size != static_cast<double>(places.bytes) &&
      !is_sum_with_ties(*survey.total_size, places.bytes, places.tied))
    survey.add(Severity::flaw, ErrorKind::corrupt, Defect::index, survey.index, "",
               fmt::format("index {}: \"total_size\" is {}, and the tensors have {} bytes", in_quotes(survey.index),
                           to_json(Config(*survey.total_size)), places.bytes));
}

void refuse_lack_of_descriptors(const Error& failure, const std::string& directory, std::size_t files) {
  if (failure.os_error() != EMFILE && failure.os_error() != ENFILE) return;
  const std::uint64_t needed = files + descriptors_beside_files;
  throw file_error(ErrorKind::io, "reading", directory,
                   fmt::format("the {} files cannot all be open at once: {}. Raise the limit (ulimit -n {})", files,
                               failure.what(), needed),
                   failure.os_error());
}

ModelSurvey survey_model(const std::string& directory, const std::vector<std::string>& listing) {
  ModelSurvey survey = choose_files(directory, listing);
  os::allow_open_files(survey.names.size() + descriptors_beside_files);
  TensorPlaces places;
  for (const std::string& name : survey.names) {
    const std::string path = join_path(directory, name);
    std::error_code error;
    if (!fs::exists(fs::symlink_status(path, error))) continue;  // choose_files() has added a finding
    try {
      survey.files.push_back({name, SafetensorsFile::open(path)});
    } catch (const Error& failure) {
      refuse_lack_of_descriptors(failure, directory, survey.names.size());
      survey.add(Severity::refused, failure.kind(), Defect::file, name, "", failure.what());
      continue;
    }
    const SafetensorsFile& file = survey.files.back().file;
    places.files.insert(name);
    for (const TensorEntry& entry : file.tensors()) places.add(survey, entry.name, name, entry.bytes);
    if (const std::string part = words_of_part("", file.metadata()); !part.empty())
      survey.add(Severity::refused, ErrorKind::invalid_argument, Defect::mismatch, name, "",
                 fmt::format("{} is {} according to its metadata, not a model. Pass the directory that has all of them",
                             in_quotes(name), part));
  }
  check_tensors(survey, places);
  if (!survey.is_refused()) check_config(survey);
  return survey;
}

ShardSurvey survey_shards(const std::vector<std::string>& listing) {
  ShardSurvey survey;
  std::map<int, std::set<int>> sets;  // the ranks that have a shard, by the number of ranks
  const auto add = [&](Severity severity, ErrorKind kind, Defect defect, const std::string& file, std::string words) {
    survey.findings.push_back({severity, kind, {defect, file, "", std::move(words)}});
  };
  for (const std::string& name : listing) {
    if (const auto shard = parse_shard_file_name(name)) {
      sets[shard->ranks].insert(shard->rank);
      survey.names.push_back(name);
    } else if (is_weight_name(name)) {
      add(Severity::flaw, ErrorKind::invalid_argument, Defect::numbering, name,
          fmt::format("{} is left out: the directory has shards, and this file does not have the name of a shard",
                      in_quotes(name)));
    }
  }
  if (sets.empty()) return survey;
  survey.ranks = sets.begin()->first;
  if (sets.size() > 1) {
    std::vector<int> sizes;
    for (const auto& [ranks, set] : sets) sizes.push_back(ranks);
    add(Severity::refused, ErrorKind::invalid_argument, Defect::numbering,
        shard_file_name(*sets.begin()->second.begin(), survey.ranks),
        fmt::format("the directory has sets of shards of {} ranks. Move all sets except one away",
                    fmt::join(sizes, " and of ")));
  }
  for (const auto& [ranks, set] : sets)
    for (int rank = 0; rank < ranks; ++rank) {
      if (set.contains(rank)) continue;
      const int first = rank;
      while (rank + 1 < ranks && !set.contains(rank + 1)) ++rank;
      const std::string name = shard_file_name(first, ranks);
      add(Severity::refused, ErrorKind::not_found, Defect::missing, name,
          fmt::format(
              "shard {}{} does not exist ({} of {} are present). Copy {} from the same set, or shard the model again",
              in_quotes(name), first == rank ? "" : fmt::format(" to that of rank {}", rank), set.size(), ranks,
              first == rank ? "it" : "them"));
    }
  return survey;
}

}  // namespace muster
