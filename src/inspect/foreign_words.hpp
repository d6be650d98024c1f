// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the codes of a report mean, in words for people.

#include <cstdint>
#include <string>
#include <string_view>

#include "src/hdf5/foreign_report.hpp"

namespace muster::inspect {

/// One printable line; `words` come from the file and may be anything.
std::string issue_words(hdf5::IssueCode code, std::uint64_t number, std::string_view words);

/// "lzf (32000)"; "the filter 4711" where it has no name here.
std::string filter_name(std::uint64_t id, std::string_view name_in_file);

}  // namespace muster::inspect
