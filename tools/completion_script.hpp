// SPDX-License-Identifier: Apache-2.0
#pragma once
// Completion for shells.

#include <string>

#include "tools/app_description.hpp"

namespace muster::tools {

/// A script that bash sources; it needs nothing else.
std::string bash_completion(const AppDescription& app);
/// A script for a directory of zsh's fpath, or to be sourced.
std::string zsh_completion(const AppDescription& app);

}  // namespace muster::tools
