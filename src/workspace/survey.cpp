// SPDX-License-Identifier: Apache-2.0
#include "src/workspace/survey.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "muster/state_file.hpp"
#include "src/base/escaped.hpp"
#include "src/os/directory.hpp"
#include "src/os/publish.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {
namespace {

constexpr std::size_t most_missing = 1024;

bool is_directory_kind(NameKind kind) noexcept {
  return kind == NameKind::job || kind == NameKind::meeting;
}

/// Counts the contents of the directory of a file group or a meeting, and determines whether one of its processes may
/// live.
void look_inside(const std::string& path, SurveyEntry& entry) {
  std::set<int> gone;
  std::vector<std::pair<int, os::Life>> writers;
  entry.bytes = 0;
  entry.files = 0;
  for (const os::DirectoryEntry& file : os::list_directory(path)) {
    // A removed file that a process still has open: the client deletes it by itself.
    if (file.name.starts_with(".nfs") || file.name.starts_with(".fuse_hidden")) continue;
    if (const auto status = os::file_status(path + "/" + file.name)) {
      entry.bytes += status->is_regular ? status->bytes : 0;
      entry.changed = std::max(entry.changed, status->changed);
      ++entry.files;
    }
    const bool is_meeting = entry.name->kind == NameKind::meeting;
    const auto hello = is_meeting ? meeting_writer(file.name) : std::nullopt;
    if (file.is_directory || !(is_meeting ? hello.has_value() : is_group_file(file.name))) {
      entry.foreign = file.name;
    } else if (hello) {
      writers.emplace_back(-1, os::life_of(*hello));
    } else if (const auto member = parse_member_name(file.name)) {
      writers.emplace_back(member->rank, os::life_of(member->writer));
    } else if (const auto rank = number_behind(file.name, "gone-")) {
      gone.insert(static_cast<int>(*rank));
    }
  }
  // A rank that lives but has left the group needs no file of it.
  const auto is = [&](os::Life life) {
    return [&, life](const auto& writer) { return writer.second == life && !gone.contains(writer.first); };
  };
  if (std::ranges::any_of(writers, is(os::Life::alive)))
    entry.writer = os::Life::alive;
  else if (std::ranges::any_of(writers, is(os::Life::unknown)))
    entry.writer = os::Life::unknown;
  else
    entry.writer = !writers.empty() || entry.files == 0 ? os::Life::dead : os::Life::unknown;
}

/// Returns nullopt if the file has been removed in the meantime.
std::optional<SurveyEntry> entry_of(const std::string& workspace, const os::DirectoryEntry& file) {
  const std::string path = workspace + "/" + file.name;
  const auto status = os::file_status(path);
  if (!status) return std::nullopt;
  SurveyEntry entry;
  entry.file = file.name;
  entry.name = parse_name(file.name);
  if (entry.name && (is_directory_kind(entry.name->kind) ? !status->is_directory : !status->is_regular))
    entry.name.reset();
  entry.bytes = status->is_regular ? status->bytes : 0;
  entry.changed = status->changed;
  if (entry.name && is_directory_kind(entry.name->kind)) {
    try {
      look_inside(path, entry);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::not_found) return std::nullopt;
      throw;
    }
  } else if (entry.name && entry.name->writer) {
    entry.writer = os::life_of(*entry.name->writer);
  }
  return entry;
}

/// Returns nullopt if the file has been removed in the meantime.
std::optional<SurveyState> state_of(const std::string& workspace, SurveyEntry entry, const SurveyOptions& options) {
  SurveyState state;
  state.rank = entry.name->rank;
  state.world_size = entry.name->world_size;
  state.step = entry.name->step;
  state.complete = true;
  const std::string path = workspace + "/" + entry.file;
  if (options.open_states) {
    try {
      const StateFile file = StateFile::open(path, FileAccess::read);
      state.tensors = file.tensors().size();
      for (const StateTensor& tensor : file.tensors()) {
        state.tensor_bytes += tensor.bytes;
        state.compressed = state.compressed || tensor.compressed;
      }
      const StateFileInfo& info = file.info();
      if (job_text(info.job) != entry.name->job || info.rank != state.rank || info.world_size != state.world_size ||
          info.step != state.step) {
        state.complete = false;
        state.problem = fmt::format("{} was renamed or copied: its header records rank {} of {}, step {} of job {}",
                                    in_quotes(path), info.rank, info.world_size, info.step, job_text(info.job));
      }
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::not_found) return std::nullopt;
      state.complete = false;
      state.problem = error.what();
    }
  }
  state.entry = std::move(entry);
  return state;
}

void conclude(SurveyJob& job) {
  const auto order = [](const SurveyState& a, const SurveyState& b) {
    return std::pair(a.rank, a.step) < std::pair(b.rank, b.step);
  };
  std::ranges::sort(job.states, order);
  std::ranges::sort(job.kept, order);
  const auto count = [&](const SurveyEntry& entry) {
    job.bytes += entry.bytes;
    job.changed = std::max(job.changed, entry.changed);
    if (entry.name->world_size > job.world_size) job.world_size = entry.name->world_size;
  };
  std::set<int> present;
  std::vector<Name> complete;
  for (const SurveyState& state : job.states) {
    count(state.entry);
    if (!state.complete) continue;
    present.insert(state.rank);
    complete.push_back(*state.entry.name);
  }
  for (const SurveyState& state : job.kept) count(state.entry);
  for (const SurveyEntry& entry : job.passing) count(entry);
  const std::set<std::uint64_t> common = common_steps(complete, job.world_size);
  if (!common.empty()) job.common_step = *common.rbegin();
  if (job.states.empty()) return;
  // The world size comes from a file name, which may claim any number of ranks.
  for (int rank = 0; rank < job.world_size && job.missing_ranks.size() < most_missing; ++rank)
    if (!present.contains(rank)) job.missing_ranks.push_back(rank);
}

void require_workspace(const std::string& path, const std::vector<os::DirectoryEntry>& entries, Survey& survey) {
  const std::string mark = file_name({.kind = NameKind::mark});
  if (std::ranges::find(entries, mark, &os::DirectoryEntry::name) != entries.end() && check_mark(path)) {
    survey.marked = Marked::by_mark;
  } else if (entries.empty()) {
    survey.marked = Marked::empty;
  } else if (std::ranges::any_of(entries, [](const auto& entry) { return parse_name(entry.name).has_value(); })) {
    survey.marked = Marked::by_names;
  } else {
    const auto unfinished =
        std::ranges::find_if(entries, [](const auto& entry) { return os::is_partial_name(entry.name); });
    if (unfinished != entries.end())
      throw Error(
          ErrorKind::invalid_argument,
          fmt::format("{} is not a Muster workspace: it contains {}, which an export or a conversion has not finished. "
                      "If that command was killed, run it again with the same output: it deletes the file",
                      in_quotes(path), in_quotes(unfinished->name)),
          {.path = path});
    refuse_other_files(path, entries.front().name);
  }
}

[[noreturn]] void refuse_states(const Survey& survey, ErrorKind kind, const std::string& words) {
  throw Error(kind, fmt::format("workspace {}: {}", in_quotes(survey.path), words), {.path = survey.path});
}

std::string names_of(const std::vector<const SurveyJob*>& jobs) {
  std::string names;
  for (const SurveyJob* job : jobs) names += (names.empty() ? "" : ", ") + job->nonce;
  return names;
}

const SurveyJob& choose_job(const Survey& survey, const std::string& prefix) {
  std::vector<const SurveyJob*> all;
  std::vector<const SurveyJob*> chosen;
  for (const SurveyJob& job : survey.jobs) {
    if (job.states.empty()) continue;
    all.push_back(&job);
    if (job.nonce.starts_with(prefix)) chosen.push_back(&job);
  }
  if (all.empty()) refuse_states(survey, ErrorKind::not_found, "no rank has written a state");
  if (chosen.empty())
    refuse_states(survey, ErrorKind::not_found,
                  fmt::format("no job begins with {} (jobs: {})", in_quotes(prefix), names_of(all)));
  if (chosen.size() > 1)
    refuse_states(survey, ErrorKind::invalid_argument,
                  fmt::format("it has states of several jobs. Choose one with --job-id: {}", names_of(chosen)));
  return *chosen.front();
}

ChosenState chosen_from(const Survey& survey, const SurveyState& state) {
  return {(std::filesystem::path(survey.path) / state.entry.file).string(), state.rank, state.step};
}

}  // namespace

Survey survey(const std::string& path, const SurveyOptions& options) {
  const auto status = os::file_status(path, os::Links::followed);
  if (!status)
    throw Error(ErrorKind::not_found, fmt::format("workspace {} does not exist", in_quotes(path)), {.path = path});
  if (!status->is_directory)
    throw Error(ErrorKind::invalid_argument, fmt::format("{} is not a Muster workspace: it is a file", in_quotes(path)),
                {.path = path});
  Survey survey;
  survey.path = path;
  const auto entries = os::list_directory(path);
  require_workspace(path, entries, survey);
  std::map<std::string, SurveyJob> jobs;
  const auto job_of = [&](const std::string& nonce) -> SurveyJob& {
    SurveyJob& job = jobs[nonce];
    job.nonce = nonce;
    return job;
  };
  for (const os::DirectoryEntry& file : entries) {
    std::optional<SurveyEntry> entry = entry_of(path, file);
    if (!entry) continue;
    survey.bytes += entry->bytes;
    survey.files += entry->files;
    if (!entry->name) {
      survey.foreign.push_back(std::move(*entry));
      continue;
    }
    const NameKind kind = entry->name->kind;
    const std::string nonce = entry->name->job;
    if (kind == NameKind::mark) continue;
    if (kind == NameKind::state || kind == NameKind::kept) {
      if (auto state = state_of(path, std::move(*entry), options))
        (kind == NameKind::state ? job_of(nonce).states : job_of(nonce).kept).push_back(std::move(*state));
    } else if (!nonce.empty()) {
      job_of(nonce).passing.push_back(std::move(*entry));
    } else {
      survey.temporary.push_back(std::move(*entry));
    }
  }
  for (auto& [nonce, job] : jobs) {
    std::ranges::sort(job.passing, {}, &SurveyEntry::file);
    conclude(job);
    survey.jobs.push_back(std::move(job));
  }
  std::ranges::stable_sort(survey.jobs, std::ranges::greater{}, &SurveyJob::changed);
  std::ranges::sort(survey.temporary, {}, &SurveyEntry::file);
  std::ranges::sort(survey.foreign, {}, &SurveyEntry::file);
  return survey;
}

bool is_workspace_directory(const std::string& path) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error))
    if (parse_name(entry->path().filename().string())) return true;
  return false;
}

ChosenStates choose_states(const std::string& path, const StateChoice& choice) {
  const Survey survey = workspace::survey(path);
  const SurveyJob& job = choose_job(survey, choice.job);
  ChosenStates chosen{job.nonce, job.world_size, {}};
  for (const SurveyState& state : job.states) {
    if (!state.complete || (choice.rank && state.rank != *choice.rank) || (choice.step && state.step != *choice.step))
      continue;
    // Sorted by rank, then step: the last one is the newest.
    if (!chosen.states.empty() && chosen.states.back().rank == state.rank) chosen.states.pop_back();
    chosen.states.push_back(chosen_from(survey, state));
  }
  if (chosen.states.empty()) {
    std::string what = "no complete state";
    if (choice.rank) what += fmt::format(" of rank {}", *choice.rank);
    if (choice.step) what += fmt::format(" of step {}", *choice.step);
    refuse_states(survey, ErrorKind::not_found,
                  fmt::format("job {} has {}. Run muster ls to list the states", job.nonce, what));
  }
  return chosen;
}

ChosenStates choose_common_states(const std::string& path, const StateChoice& choice) {
  const Survey survey = workspace::survey(path);
  const SurveyJob& job = choose_job(survey, choice.job);
  const std::optional<std::uint64_t> step = choice.step ? choice.step : job.common_step;
  ChosenStates chosen{job.nonce, job.world_size, {}};
  std::vector<bool> is_there(static_cast<std::size_t>(std::max(job.world_size, 0)));
  for (const SurveyState& state : job.states) {
    if (!state.complete || state.step != step || state.rank < 0 || state.rank >= job.world_size) continue;
    chosen.states.push_back(chosen_from(survey, state));
    is_there[static_cast<std::size_t>(state.rank)] = true;
  }
  if (chosen.states.size() == is_there.size() && !is_there.empty()) return chosen;
  std::string missing;
  for (std::size_t rank = 0; rank < is_there.size() && step; ++rank)
    if (!is_there[rank]) missing += fmt::format("{}{}", missing.empty() ? "; missing: rank " : ", ", rank);
  refuse_states(
      survey, ErrorKind::not_found,
      choice.step
          ? fmt::format("job {} has no complete states of step {} of all {} ranks{}", job.nonce, *step, job.world_size,
                        missing)
          : fmt::format("job {} has no step with complete states of all {} ranks. Run muster ls to list the states",
                        job.nonce, job.world_size));
}

}  // namespace muster::workspace
