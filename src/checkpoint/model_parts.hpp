// SPDX-License-Identifier: Apache-2.0
#pragma once
// Paths that are not a model, but are near one: a file that is a part of a larger whole, and a directory
// above the one that has the checkpoint.

#include <map>
#include <string>

namespace muster {

/// Describes the part of a larger whole that a file is, by its name or by its metadata; empty if neither names one.
/// Such a file can be inspected, and is not a model. With an empty path the metadata alone count.
std::string words_of_part(const std::string& path, const std::map<std::string, std::string>& metadata = {});

/// Throws Error(argument) with the remedy if the file is a part.
void refuse_part(const std::string& path, const std::map<std::string, std::string>& metadata = {});

/// Directories below this one that have a checkpoint, as the end of an error message: "; a checkpoint is in \"a/b\"
/// ...". Empty if there are none.
std::string hint_below(const std::string& directory);

}  // namespace muster
