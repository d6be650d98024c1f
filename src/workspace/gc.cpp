// SPDX-License-Identifier: Apache-2.0
#include "src/workspace/gc.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "src/base/escaped.hpp"
#include "src/os/directory.hpp"
#include "src/os/publish.hpp"
#include "src/workspace/discovery.hpp"
#include "src/workspace/group_directory.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {
namespace {

using Time = std::chrono::system_clock::time_point;

/// Reads the clock that sets the times of files.
Time server_time(const std::string& path) {
  try {
    if (const auto status = probe(path)) return status->changed;
  } catch (const Error&) {
    // The directory is read-only, so this host's clock is used.
  }
  return std::chrono::system_clock::now();
}

std::string writer_text(const SurveyEntry& entry) {
  if (!entry.name->writer) return {};
  return fmt::format(" (pid {} on host {})", entry.name->writer->pid, in_quotes(entry.name->writer->host));
}

/// The clean-up of one workspace.
class Collection {
 public:
  Collection(const std::string& path, const GcOptions& options)
      : path_(path),
        options_(options),
        now_(options.older_than ? server_time(path) : std::chrono::system_clock::now()) {}

  GcReport operator()(const Survey& survey) {
    for (const SurveyEntry& entry : survey.temporary) judge_passing(entry);
    for (const SurveyJob& job : survey.jobs) {
      for (const SurveyEntry& entry : job.passing) judge_passing(entry);
      judge_states(job.states, "a state");
      judge_states(job.kept, "kept for inspection");
    }
    std::ranges::sort(report_.items, {}, &GcItem::file);
    return std::move(report_);
  }

 private:
  [[nodiscard]] std::chrono::seconds age_of(Time changed) const {
    return std::max(std::chrono::seconds(0), std::chrono::duration_cast<std::chrono::seconds>(now_ - changed));
  }
  [[nodiscard]] bool is_old(Time changed) const {
    return options_.older_than && now_ - changed >= *options_.older_than;
  }

  void judge_passing(const SurveyEntry& entry) {
    const bool is_directory = entry.name->kind == NameKind::job || entry.name->kind == NameKind::meeting;
    if (!entry.foreign.empty()) {
      keep(entry, fmt::format("it contains {}, which is not a file of Muster. Move that file away first",
                              in_quotes(entry.foreign)));
    } else if (entry.writer == os::Life::dead) {
      std::string reason = "its writer" + writer_text(entry) + " has ended";
      if (is_directory) reason = entry.files == 0 ? "it is empty" : "its ranks have left or ended";
      take(entry, reason);
    } else if (entry.writer == os::Life::alive) {
      keep(entry, is_directory ? "one of its ranks is running on this host"
                               : "its writer" + writer_text(entry) + " is running");
    } else if (is_old(entry.changed)) {
      take(entry, fmt::format("not changed for {}", age_text(age_of(entry.changed))));
    } else {
      keep(entry, (is_directory ? "its ranks" : "its writer" + writer_text(entry)) +
                      " may still be running. Run muster gc on that host, or pass --stale-after AGE");
    }
  }

  void judge_states(const std::vector<SurveyState>& states, const char* what) {
    if (states.empty()) return;
    Time newest{};
    for (const SurveyState& state : states) newest = std::max(newest, state.entry.changed);
    for (const SurveyState& state : states) {
      if (is_old(newest))
        take(state.entry, fmt::format("{}; the newest one of the job is {} old", what, age_text(age_of(newest))));
      else
        keep(state.entry, std::string(what) + ", deleted only with --stale-after AGE");
    }
  }

  GcItem& add(const SurveyEntry& entry, GcVerdict verdict, std::string reason) {
    report_.items.push_back({.file = entry.file,
                             .kind = entry.name->kind,
                             .bytes = entry.bytes,
                             .files = entry.files,
                             .age = age_of(entry.changed),
                             .verdict = verdict,
                             .reason = std::move(reason)});
    return report_.items.back();
  }
  void keep(const SurveyEntry& entry, std::string reason) { add(entry, GcVerdict::keep, std::move(reason)); }

  void take(const SurveyEntry& entry, std::string reason) {
    GcItem& item = add(entry, GcVerdict::remove, std::move(reason));
    if (!options_.dry_run) {
      try {
        if (!remove(entry)) throw Error(ErrorKind::io, "it is not empty any more");
      } catch (const Error& error) {
        item.verdict = GcVerdict::failed;
        item.reason += fmt::format("; failed: {}", error.what());
        return;
      }
    }
    report_.removed_bytes += item.bytes;
    report_.removed_files += item.files;
  }

  [[nodiscard]] bool remove(const SurveyEntry& entry) const {
    const std::string path = path_ + "/" + entry.file;
    switch (entry.name->kind) {
      case NameKind::job:
        remove_group_directory(path);
        break;
      case NameKind::meeting:
        remove_meeting(path);
        break;
      default:
        os::remove_file(path);
    }
    return !os::file_status(path);
  }

  /// Removes file by file, because a process may be adding its hello at this moment.
  void remove_meeting(const std::string& path) const {
    for (const os::DirectoryEntry& file : os::list_directory(path)) {
      const auto status = os::file_status(path + "/" + file.name);
      if (!status || status->is_directory) continue;
      const auto writer = meeting_writer(file.name);
      if (writer && (os::life_of(*writer) == os::Life::dead || is_old(status->changed)))
        os::remove_file(path + "/" + file.name);
    }
    os::remove_empty_directory(path);
  }

  const std::string& path_;
  const GcOptions& options_;
  Time now_;
  GcReport report_;
};

}  // namespace

std::string age_text(std::chrono::seconds age) {
  constexpr std::int64_t minute = 60;
  constexpr std::int64_t hour = 60 * minute;
  constexpr std::int64_t day = 24 * hour;
  const std::int64_t seconds = age.count();
  if (seconds < 1) return "now";
  if (seconds < 2 * minute) return fmt::format("{} s", seconds);
  if (seconds < 2 * hour) return fmt::format("{} min", seconds / minute);
  if (seconds < 2 * day) return fmt::format("{} h", seconds / hour);
  return fmt::format("{} d", seconds / day);
}

GcReport collect_garbage(const std::string& path, const GcOptions& options) {
  return Collection(path, options)(survey(path, {.open_states = false}));
}

std::uint64_t sweep_dead(const std::string& path) noexcept {
  try {
    return collect_garbage(path, {.dry_run = false, .older_than = {}}).removed_files;
  } catch (const std::exception&) {
    return 0;
  }
}

}  // namespace muster::workspace
