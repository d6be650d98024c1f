// SPDX-License-Identifier: Apache-2.0
#pragma once
// Error messages for two paths that users confuse with a model: a file that is only one part of a checkpoint, and a
// parent directory of the checkpoint.

#include <map>
#include <string>

namespace muster {

/// Describes a file that is one part of a checkpoint: "the shard of rank 1 of 4". Decides by the metadata of the file,
/// or else by its name; an empty path skips the name. Returns an empty string for any other file. A part can be
/// inspected, but is not a model.
std::string words_of_part(const std::string& path, const std::map<std::string, std::string>& metadata = {});

/// Throws Error(argument) with the remedy if the file is one part of a checkpoint.
void refuse_part(const std::string& path, const std::map<std::string, std::string>& metadata = {});

/// Searches the directory for checkpoints, and returns the end of an error message that names them: "; below it \"a/b\"
/// has a checkpoint: name one of these directories". Returns an empty string if it finds none.
std::string hint_below(const std::string& directory);

}  // namespace muster
