// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/workspace_states.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>

#include "muster/error.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/core/quoted.hpp"
#include "src/workspace/names.hpp"
#include "src/workspace/survey.hpp"

namespace muster {
namespace {

using workspace::Survey;
using workspace::SurveyJob;
using workspace::SurveyState;

[[noreturn]] void refuse(const Survey& survey, ErrorKind kind, const std::string& words) {
  throw Error(kind, fmt::format("reading the workspace {}: {}", in_quotes(survey.path), words), {.path = survey.path});
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
  if (all.empty()) refuse(survey, ErrorKind::not_found, "it has no states");
  if (chosen.empty())
    refuse(survey, ErrorKind::not_found,
           fmt::format("it has no states of a job {}; there are those of {}", in_quotes(prefix), names_of(all)));
  if (chosen.size() > 1)
    refuse(survey, ErrorKind::argument,
           fmt::format("it has states of several jobs; choose one by --job: {}", names_of(chosen)));
  return *chosen.front();
}

ChosenState chosen_from(const Survey& survey, const SurveyState& state) {
  return {join_path(survey.path, state.entry.file), state.rank, state.generation};
}

}  // namespace

bool is_workspace_directory(const std::string& path) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error))
    if (workspace::parse_name(entry->path().filename().string())) return true;
  return false;
}

ChosenStates choose_states(const std::string& path, const StateChoice& choice) {
  const Survey survey = workspace::survey(path);
  const SurveyJob& job = choose_job(survey, choice.job);
  ChosenStates chosen{job.nonce, job.world_size, {}};
  for (const SurveyState& state : job.states) {
    if (!state.complete || (choice.rank && state.rank != *choice.rank) ||
        (choice.generation && state.generation != *choice.generation))
      continue;
    // Sorted by rank, then generation: the last one is the newest.
    if (!chosen.states.empty() && chosen.states.back().rank == state.rank) chosen.states.pop_back();
    chosen.states.push_back(chosen_from(survey, state));
  }
  if (chosen.states.empty()) {
    std::string what = "no complete state";
    if (choice.rank) what += fmt::format(" of rank {}", *choice.rank);
    if (choice.generation) what += fmt::format(" of generation {}", *choice.generation);
    refuse(survey, ErrorKind::not_found,
           fmt::format("the job {} has {}; muster ls shows what there is", job.nonce, what));
  }
  return chosen;
}

ChosenStates choose_common_states(const std::string& path, const StateChoice& choice) {
  const Survey survey = workspace::survey(path);
  const SurveyJob& job = choose_job(survey, choice.job);
  const std::optional<std::uint64_t> generation = choice.generation ? choice.generation : job.common_generation;
  ChosenStates chosen{job.nonce, job.world_size, {}};
  std::vector<bool> is_there(static_cast<std::size_t>(std::max(job.world_size, 0)));
  for (const SurveyState& state : job.states) {
    if (!state.complete || state.generation != generation || state.rank < 0 || state.rank >= job.world_size) continue;
    chosen.states.push_back(chosen_from(survey, state));
    is_there[static_cast<std::size_t>(state.rank)] = true;
  }
  if (chosen.states.size() == is_there.size() && !is_there.empty()) return chosen;
  std::string missing;
  for (std::size_t rank = 0; rank < is_there.size() && generation; ++rank)
    if (!is_there[rank]) missing += fmt::format("{}{}", missing.empty() ? "; missing: rank " : ", ", rank);
  refuse(survey, ErrorKind::not_found,
         choice.generation
             ? fmt::format("the job {} has not complete states of generation {} of all {} ranks{}", job.nonce,
                           *generation, job.world_size, missing)
             : fmt::format("the job {} has no generation of which all {} ranks have a complete state; muster ls shows "
                           "what there is",
                           job.nonce, job.world_size));
}

}  // namespace muster
