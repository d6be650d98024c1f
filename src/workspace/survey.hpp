// SPDX-License-Identifier: Apache-2.0
#pragma once
// Surveys a workspace without changing it, and selects states in it.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/workspace/names.hpp"

namespace muster::workspace {

/// How a directory is recognised as a workspace.
enum class Marked : std::uint8_t {
  by_mark,   ///< it has a marker file of a version that this program knows
  by_names,  ///< the marker is missing or empty, but some files have names that only Muster uses
  empty,     ///< the directory is empty
};

/// One file, or the directory of a file group or a meeting.
struct SurveyEntry {
  std::string file;                               ///< its name in the workspace
  std::optional<Name> name;                       ///< nullopt: the file is not Muster's
  std::uint64_t bytes = 0;                        ///< for a directory: the total size of its files
  std::uint64_t files = 1;                        ///< for a directory: the number of its files
  std::chrono::system_clock::time_point changed;  ///< by the server's clock; for a directory: the newest change in it
  /// only for kinds that name their writer; a file group is dead if all ranks have left or are dead, and alive if one
  /// lives
  os::Life writer = os::Life::unknown;
  std::string foreign = {};  ///< for a directory: a file in it that Muster did not write
};

/// A state file of a rank: `state` or `kept`.
struct SurveyState {
  SurveyEntry entry;
  int rank = 0;
  int world_size = 1;
  std::uint64_t step = 0;
  bool complete = false;           ///< the commit mark is present and correct, and agrees with the file name
  std::string problem;             ///< why it is not complete
  std::uint64_t tensors = 0;       ///< only if the state is complete
  std::uint64_t tensor_bytes = 0;  ///< uncompressed
  bool compressed = false;
};

/// The files of one job in the workspace.
struct SurveyJob {
  std::string nonce;                              ///< 32 digits
  int world_size = 0;                             ///< the largest one in the names of its files
  std::vector<SurveyState> states;                ///< sorted by rank, then step
  std::vector<SurveyState> kept;                  ///< sorted like `states`; the step is the gather's number
  std::vector<SurveyEntry> passing;               ///< exchange files, tokens, the file group's directory
  std::uint64_t bytes = 0;                        ///< of all of the files above
  std::chrono::system_clock::time_point changed;  ///< the newest change of these files
  /// Ranks without a complete state; empty if each rank has one.
  std::vector<int> missing_ranks;
  /// The newest step for which every rank has a complete state.
  std::optional<std::uint64_t> common_step;
};

struct Survey {
  std::string path;
  Marked marked = Marked::by_mark;
  std::vector<SurveyJob> jobs;         ///< newest first
  std::vector<SurveyEntry> temporary;  ///< growing files, probes, meetings
  std::vector<SurveyEntry> foreign;    ///< files that Muster did not write
  std::uint64_t bytes = 0;             ///< of all files, including those of other programs
  std::uint64_t files = 0;
};

struct SurveyOptions {
  /// If true, each state's commit mark and catalogue are read (two reads). If false, only names and sizes are used, and
  /// `complete` is derived from the name.
  bool open_states = true;
};

/// Surveys the directory and never writes. Throws Error(not_found) if the directory does not exist,
/// Error(invalid_argument) if the path is a file or is not a workspace (the message names a file in it), Error(version)
/// if a newer Muster made the marker, Error(corrupt) if the marker is damaged, and Error(io). Files that disappear
/// during the survey are left out. A damaged state is an entry with a problem, not an error.
Survey survey(const std::string& path, const SurveyOptions& options = {});

// Selects states of a workspace: one job, some ranks, one step.

/// The criteria for the selection.
struct StateChoice {
  std::optional<int> rank = {};            ///< only this rank
  std::optional<std::uint64_t> step = {};  ///< nullopt: the newest complete step
  std::string job = {};                    ///< prefix of the nonce; empty: the only job in the workspace
};

/// A selected state.
struct ChosenState {
  std::string path;
  int rank = 0;
  std::uint64_t step = 0;
};

struct ChosenStates {
  std::string job;                  ///< 32 digits
  int world_size = 0;               ///< of the job
  std::vector<ChosenState> states;  ///< sorted by rank
};

/// Whether a directory is a workspace: it has the marker file, or names that only a workspace has.
bool is_workspace_directory(const std::string& path);

/// Selects the newest complete state of each rank, even if their steps differ, for inspection. Throws as survey;
/// Error(invalid_argument) if several jobs match (the message names them); Error(not_found) if the job, rank or step
/// does not exist.
ChosenStates choose_states(const std::string& workspace, const StateChoice& choice);

/// Selects the requested step, or the newest one for which all ranks have a complete state, so that the states
/// form one model. Throws as choose_states; Error(not_found) if no step is complete on all ranks (the message
/// names the missing ranks).
ChosenStates choose_common_states(const std::string& workspace, const StateChoice& choice);

}  // namespace muster::workspace
