// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster doctor` says: whether this machine, and a workspace, have what Muster needs, and what to do where not.

#include <cstdint>
#include <string>
#include <vector>

#include "src/inspect/output.hpp"

namespace muster::inspect {

enum class Health : std::uint8_t {
  good,
  note,     ///< not there, and not needed for everything
  warning,  ///< slower, or a trap
  bad,      ///< something will not work
};

struct Finding {
  std::string name;  ///< "memory", "memfd"
  Health health = Health::good;
  std::string value;  ///< what was found
  std::string remedy = {};
};

/// Of this machine and this process's surroundings. Nothing is changed.
std::vector<Finding> examine_machine();

/// Of a directory that is, or is to be, a workspace: a probe is made in it and removed.
std::vector<Finding> examine_workspace(const std::string& path);

/// A line a finding, its remedy below it.
std::string findings_text(const std::vector<Finding>& findings, const OutputStyle& style);
/// {"healthy", "checks": [{"name", "state", "value", "remedy"}]}.
Config findings_tree(const std::vector<Finding>& findings);

/// None of them is bad.
bool is_healthy(const std::vector<Finding>& findings);

}  // namespace muster::inspect
