// SPDX-License-Identifier: Apache-2.0
#pragma once
// Clean-up of a SOURCE directory: the unfinished versions of publishers, and versions whose deletion was interrupted.
// Both are named weight_v00000N.partial-NONCE@WRITER (os/publish.hpp). The rules are those of a workspace
// (workspace/gc.hpp): a directory is deleted if its writer is proved dead, or is older than an age that the user gives.
// Versions, and files of other programs, are never touched.

#include <string>

#include "src/workspace/gc.hpp"

namespace muster::versions {

/// Returns whether a directory has versions or unfinished versions. Returns false if it cannot be listed.
bool is_version_directory(const std::string& path) noexcept;

/// Deletes unfinished versions, or lists them (`dry_run`). Throws Error(not_found | io). A directory that cannot be
/// deleted is an item, not an error.
workspace::GcReport collect_unfinished(const std::string& source, const workspace::GcOptions& options);

}  // namespace muster::versions
