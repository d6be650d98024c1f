// SPDX-License-Identifier: Apache-2.0
#include "src/versions/unfinished.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <system_error>
#include <vector>

#include "src/base/escaped.hpp"
#include "src/os/directory.hpp"
#include "src/os/publish.hpp"
#include "src/versions/chain.hpp"

namespace muster::versions {
namespace {

using Time = std::chrono::system_clock::time_point;

/// Reads the clock that sets the times of files.
Time clock_of(const std::string& source) {
  try {
    if (const auto status = workspace::probe(source)) return status->changed;
  } catch (const Error&) {
    // The directory is read-only, so this host's clock is used.
  }
  return std::chrono::system_clock::now();
}

/// Adds the size and the newest change of a directory that another process may be deleting.
void measure(const std::string& path, workspace::GcItem& item, Time& newest) {
  item.files = 0;
  std::error_code error;
  const auto look = [&](const std::string& name) {
    const auto status = os::file_status(name);
    if (!status) return;
    newest = std::max(newest, status->changed);
    if (status->is_directory) return;
    ++item.files;
    item.bytes += status->bytes;
  };
  look(path);
  for (std::filesystem::recursive_directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error))
    look(entry->path().string());
}

}  // namespace

bool is_version_directory(const std::string& path) noexcept {
  try {
    const VersionNames names = list_versions(path);
    return !names.versions.empty() || !names.unfinished.empty();
  } catch (const std::exception&) {
    return false;
  }
}

workspace::GcReport collect_unfinished(const std::string& source, const workspace::GcOptions& options) {
  using workspace::GcVerdict;
  workspace::GcReport report;
  const Time now = options.older_than ? clock_of(source) : std::chrono::system_clock::now();
  for (const std::string& name : list_versions(source).unfinished) {
    const std::string path = source + "/" + name;
    // The part before the mark is the name of the version.
    const auto all = os::unfinished_of(source + "/" + name.substr(0, name.find('.')));
    const auto found = std::ranges::find(
        all, name, [](const os::Unfinished& one) { return one.path.substr(one.path.rfind('/') + 1); });
    if (found == all.end()) continue;  // deleted meanwhile
    workspace::GcItem item;
    item.file = name;
    item.kind = workspace::NameKind::growing;
    Time newest{};
    measure(path, item, newest);
    item.age = std::max(std::chrono::seconds(0), std::chrono::duration_cast<std::chrono::seconds>(now - newest));
    const std::string writer =
        fmt::format("its writer (pid {} on host {})", found->writer.pid, in_quotes(found->writer.host));
    const os::Life life = os::life_of(found->writer);
    if (life == os::Life::dead) {
      item.verdict = GcVerdict::remove;
      item.reason = writer + " has ended";
    } else if (life == os::Life::unknown && options.older_than && now - newest >= *options.older_than) {
      item.verdict = GcVerdict::remove;
      item.reason = fmt::format("not changed for {}", workspace::age_text(item.age));
    } else {
      item.verdict = GcVerdict::keep;
      item.reason = writer + (life == os::Life::alive
                                  ? " is running"
                                  : " may still be running. Run muster gc on that host, or pass --stale-after AGE");
    }
    if (item.verdict == GcVerdict::remove) {
      std::error_code error;
      if (!options.dry_run) std::filesystem::remove_all(path, error);
      if (error) {
        item.verdict = GcVerdict::failed;
        item.reason += "; failed: " + error.message();
      } else {
        report.removed_bytes += item.bytes;
        report.removed_files += item.files;
      }
    }
    report.items.push_back(std::move(item));
  }
  return report;
}

}  // namespace muster::versions
