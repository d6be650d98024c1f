// SPDX-License-Identifier: Apache-2.0
#pragma once
// The directory that is a workspace, and its mark.
//
//  1. The directory is listed, never asked for a name that another rank may be about to make.
//  2. A mark in it decides: its version is known, or the directory is refused.
//  3. Without a mark, a directory that is empty or has only names of ours (a rank of the same job is a moment ahead)
//     gets one; of several ranks that make it, one succeeds, and the others find it. A mark that is empty was lost in a
//     power cut, and is made anew.
//  4. The directory and its mark are on the disk before anything is written there.

#include <string>

namespace muster::workspace {

inline constexpr int workspace_version = 1;

struct WorkspaceDirectory {
  std::string path;         ///< without a slash at its end
  bool is_network = false;  ///< other hosts may write to it
};

/// Makes the directory (and those above it) and the mark where they are not there. Local, any number of processes at a
/// time. Throws Error(argument) where the path is a file, a dangling link, or a directory that is no workspace;
/// Error(version) where a newer Muster marked it; Error(corrupt) on a damaged mark; Error(io | no_space).
WorkspaceDirectory prepare_workspace(const std::string& path);

/// Whether the mark says anything: false for an empty one, and for zeros. Throws Error(version | corrupt), and as
/// read_small_file.
bool check_mark(const std::string& workspace);

}  // namespace muster::workspace
