// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster ls` and `muster gc` say of a workspace. Formats of the JSON: docs/inspecting.md.

#include <chrono>
#include <string>

#include "src/inspect/output.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/survey.hpp"

namespace muster::inspect {

using workspace::age_text;

/// "90", "30min", "12h", "2d": a number and s, min, h, d or w; seconds where there is none. Throws Error(argument).
std::chrono::seconds parse_age(const std::string& text);

/// Jobs, their ranks' states, and what else lies there. Lines end with '\n'.
std::string survey_text(const workspace::Survey& survey, std::chrono::system_clock::time_point now,
                        const OutputStyle& style);
Config survey_tree(const workspace::Survey& survey, std::chrono::system_clock::time_point now);

/// Every file with its verdict, and the sum.
std::string gc_text(const workspace::GcReport& report, bool is_dry_run, const OutputStyle& style);
Config gc_tree(const workspace::GcReport& report, bool is_dry_run);

}  // namespace muster::inspect
