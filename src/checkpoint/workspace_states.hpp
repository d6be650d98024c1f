// SPDX-License-Identifier: Apache-2.0
#pragma once
// The states of a workspace as one thing: which job, which ranks, which generation.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "muster/state_file.hpp"

namespace muster {

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
/// workspace::survey; Error(argument) where several jobs could be meant (they are named), Error(not_found) where there
/// is no such job, rank or generation.
ChosenStates choose_states(const std::string& workspace, const StateChoice& choice);

/// The newest generation of which all ranks have a complete state, or the one that is asked for: what together is a
/// model. Throws as choose_states; Error(not_found) where no generation is complete on all ranks (they are named).
ChosenStates choose_common_states(const std::string& workspace, const StateChoice& choice);

}  // namespace muster
