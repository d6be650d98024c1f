// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is in a workspace: one look at a directory, without changing anything in it; and which of its states are meant.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/workspace/names.hpp"

namespace muster::workspace {

/// Whether a directory is a workspace, and what its mark says.
enum class Marked : std::uint8_t {
  by_mark,   ///< the mark file is there and is of a version that this program knows
  by_names,  ///< no mark, or an empty one, but files that only Muster names like that
  empty,     ///< nothing in it
};

/// One file, or the directory of a file group or a meeting.
struct SurveyEntry {
  std::string file;                               ///< its name in the workspace
  std::optional<Name> name;                       ///< none: not ours
  std::uint64_t bytes = 0;                        ///< of a directory: of all that is in it
  std::uint64_t files = 1;                        ///< of a directory: how many are in it
  std::chrono::system_clock::time_point changed;  ///< by the server's clock; of a directory: the newest in it
  os::Life writer = os::Life::unknown;  ///< of kinds that name their writer; of a file group: dead where all of its
                                        ///< ranks have left or are dead, alive where one is
  std::string foreign = {};             ///< of a directory: a file in it that is not Muster's
};

/// A state file of a rank: `state` or `kept`.
struct SurveyState {
  SurveyEntry entry;
  int rank = 0;
  int world_size = 1;
  std::uint64_t generation = 0;
  bool complete = false;           ///< the commit mark is there and right, and says what the name says
  std::string problem;             ///< why it is not complete
  std::uint64_t tensors = 0;       ///< of a complete one
  std::uint64_t tensor_bytes = 0;  ///< uncompressed
  bool compressed = false;
};

/// What one job has in the workspace.
struct SurveyJob {
  std::string nonce;                              ///< 32 digits
  int world_size = 0;                             ///< the largest that its files name
  std::vector<SurveyState> states;                ///< sorted by rank, then generation
  std::vector<SurveyState> kept;                  ///< likewise; generation is the gather's number
  std::vector<SurveyEntry> passing;               ///< exchange files, tokens, the file group's directory
  std::uint64_t bytes = 0;                        ///< of all of these
  std::chrono::system_clock::time_point changed;  ///< of the newest of these
  /// Ranks of which no complete state is there; empty where all have one.
  std::vector<int> missing_ranks;
  /// The newest generation of which every rank has a complete state.
  std::optional<std::uint64_t> common_generation;
};

struct Survey {
  std::string path;
  Marked marked = Marked::by_mark;
  std::vector<SurveyJob> jobs;         ///< newest first
  std::vector<SurveyEntry> temporary;  ///< growing files, probes, meetings
  std::vector<SurveyEntry> foreign;    ///< what is not ours
  std::uint64_t bytes = 0;             ///< of all, foreign ones counted
  std::uint64_t files = 0;
};

struct SurveyOptions {
  /// Look into each state's commit mark and catalogue (two reads). False: names and sizes only; then `complete` is what
  /// the name promises.
  bool open_states = true;
};

/// Throws Error(not_found) where there is no such directory, Error(argument) where it is a file, or a directory that
/// is no workspace (the words name what is in it), Error(version) where a newer Muster marked it, Error(corrupt) on a
/// mark that is damaged, Error(io). Files that go away meanwhile are left out; a damaged state is an entry with a
/// problem, not an error. Never writes.
Survey survey(const std::string& path, const SurveyOptions& options = {});

// The states of a workspace as one thing: which job, which ranks, which generation.

/// What of a workspace is meant.
struct StateChoice {
  std::optional<int> rank = {};                  ///< this one alone
  std::optional<std::uint64_t> generation = {};  ///< none: the newest complete one
  std::string job = {};                          ///< how its nonce begins; empty: the only one that there is
};

/// A state that was chosen.
struct ChosenState {
  std::string path;
  int rank = 0;
  std::uint64_t generation = 0;
};

struct ChosenStates {
  std::string job;                  ///< 32 digits
  int world_size = 0;               ///< of the job
  std::vector<ChosenState> states;  ///< by rank
};

/// Whether a directory is a workspace: has its mark, or names that only a workspace has.
bool is_workspace_directory(const std::string& path);

/// The newest complete state of each rank, whatever its generation: for whoever wants to see what there is. Throws as
/// survey; Error(argument) where several jobs could be meant (they are named), Error(not_found) where there
/// is no such job, rank or generation.
ChosenStates choose_states(const std::string& workspace, const StateChoice& choice);

/// The newest generation of which all ranks have a complete state, or the one that is asked for: what together is a
/// model. Throws as choose_states; Error(not_found) where no generation is complete on all ranks (they are named).
ChosenStates choose_common_states(const std::string& workspace, const StateChoice& choice);

}  // namespace muster::workspace
