// SPDX-License-Identifier: Apache-2.0
#pragma once
// Paths that are no model, although there is one near them: a file that is a part of a larger whole, and a directory
// above the one that has the checkpoint.

#include <map>
#include <string>

namespace muster {

/// The words for the part of a larger whole that a file is, by its name or by its metadata; empty if neither tells of
/// one. Such a file can be looked at, and is no model. With an empty path the metadata alone count.
std::string words_of_part(const std::string& path, const std::map<std::string, std::string>& metadata = {});

/// Throws Error(argument) with the remedy if the file is a part.
void refuse_part(const std::string& path, const std::map<std::string, std::string>& metadata = {});

/// Directories below this one that have a checkpoint, as the end of an error message: "; a checkpoint is in \"a/b\"
/// ...". Empty if there are none.
std::string hint_below(const std::string& directory);

}  // namespace muster
