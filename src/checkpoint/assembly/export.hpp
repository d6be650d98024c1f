// SPDX-License-Identifier: Apache-2.0
#pragma once
// Handles the omissions of all readers (muster/omission.hpp) in the same way.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "muster/omission.hpp"

namespace muster {

/// Returns the number of omissions that are lost data.
std::size_t count_lost(const Omissions& omissions) noexcept;

/// Returns text such as `"a" (reason), "b" (reason) and 3 more`. With `lost_only`, names only lost data.
std::string omission_words(const Omissions& omissions, bool lost_only = false);

/// Throws Error(unsupported), which names the lost data, if data of `path` is lost. `doing` names the operation
/// ("exporting"), and `remedy` is the end of the message.
void refuse_lost(const Omissions& omissions, std::string_view doing, const std::string& path, std::string_view remedy);

/// Returns one note for each omission that is not lost data, for the notes of a report.
std::vector<std::string> omission_notes(const Omissions& omissions);

}  // namespace muster
