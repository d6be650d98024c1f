// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reports of `muster publish`, `muster pull` and `muster log`: as text for people, and as a tree for JSON
// (docs/reference/json-output.md). Lines end with '\n'.

#include <chrono>
#include <string>

#include "muster/config.hpp"
#include "muster/publish.hpp"
#include "src/inspect/output.hpp"

namespace muster::inspect {

/// Returns one line with the totals, and lines for the reason of a full version, deleted versions, omissions and notes.
std::string publish_text(const PublishReport& report);
/// {"version", "kind", "path", "tensors", "bytes", "changed_tensors", "changed_elements", "bytes_written", "files",
/// "reason", "removed": [version], "skipped": [{"file", "reason"}], "notes", "seconds"}.
Config publish_tree(const PublishReport& report);

/// Returns one line with the totals, and lines for omissions and notes.
std::string pull_text(const PullReport& report, const std::string& local);
/// {"version", "previous", "changed", "local", "begun_at", "applied": [version], "changed_tensors", "bytes_read",
/// "bytes_written", "bytes_linked", "skipped": [{"file", "reason"}], "notes", "seconds"}.
Config pull_tree(const PullReport& report, const std::string& local);

/// Returns one line per version, then the problems, the other entries, the local copy and the totals. `verified`: the
/// bytes were read.
std::string log_text(const VersionLog& log, bool verified, std::chrono::system_clock::time_point now,
                     const OutputStyle& style);
/// {"sound", "verified", "source", "versions": [{"version", "path", "kind", "base_version", "begins_at", "encoding",
/// "checksum_format", "tensors", "files", "bytes", "elements", "changed_elements", "stream", "publisher", "ranks",
/// "digest", "published", "age_seconds", "problems"}], "unfinished", "other_names", "local": {"path", "version",
/// "has_record", "reason"}, "problems"}; unknown facts are null.
Config log_tree(const VersionLog& log, bool verified, std::chrono::system_clock::time_point now);

}  // namespace muster::inspect
