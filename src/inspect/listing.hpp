// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster ls` says.

#include <string>

#include "src/inspect/text_table.hpp"

namespace muster::inspect {

struct ListOptions {
  std::string plan = {};    ///< for shards
  bool names_only = false;  ///< of a workspace: SurveyOptions::open_states
  OutputStyle style = {};
};

/// A workspace: its jobs, states and files. Anything else: the tensors' names, a line each: on a terminal with
/// numbers in them by their value, else in the order of the file. Throws as workspace::survey and open_source.
std::string list_text(const std::string& path, const ListOptions& options);
/// A workspace: survey_json(). Else {"path", "kind", "names"}.
std::string list_json(const std::string& path, const ListOptions& options);

}  // namespace muster::inspect
