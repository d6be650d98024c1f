// SPDX-License-Identifier: Apache-2.0
#pragma once
// The one rule for the omissions of a reader (muster/omission.hpp).

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "muster/omission.hpp"

namespace muster {

/// How many are lost.
std::size_t count_lost(const Omissions& omissions) noexcept;

/// `"a" (reason), "b" (reason) and 3 more`. With `lost_only`, data that does not belong to the model is not named.
std::string omission_words(const Omissions& omissions, bool lost_only = false);

/// Throws Error(unsupported) that names the lost data of `path`; does nothing if nothing is lost. `doing` names the
/// operation ("exporting"), `remedy` is the end of the message: how to proceed.
void refuse_lost(const Omissions& omissions, std::string_view doing, const std::string& path, std::string_view remedy);

/// A note for each omission that is not lost, for the notes of a report.
std::vector<std::string> omission_notes(const Omissions& omissions);

}  // namespace muster
