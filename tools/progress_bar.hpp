// SPDX-License-Identifier: Apache-2.0
#pragma once
// A bar for long work: on standard error, and only where that is a terminal.

#include "muster/progress.hpp"

namespace muster::tools {

/// Draws while the work goes on; empty where nobody would see it. The line is cleared when the work is done.
ProgressCallback progress_bar();

/// Takes away what is drawn of unfinished work, so that other words have the line.
void clear_progress_bar();

}  // namespace muster::tools
