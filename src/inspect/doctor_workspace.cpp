// SPDX-License-Identifier: Apache-2.0
// What there is to know of a directory that ranks share.

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <string_view>

#include "muster/error.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/inspect/doctor.hpp"
#include "src/inspect/output.hpp"
#include "src/os/directory.hpp"
#include "src/os/machine.hpp"
#include "src/os/publish.hpp"
#include "src/workspace/names.hpp"
#include "src/workspace/survey.hpp"

namespace muster::inspect {
namespace {

constexpr std::uint64_t little_space = std::uint64_t{1} << 30;

Finding contents(const std::string& path) {
  try {
    const workspace::Survey survey = workspace::survey(path, {.open_states = false});
    Finding finding{"workspace", Health::good,
                    fmt::format("{}: {}, {}, {}", printable(path), counted(survey.jobs.size(), "job"),
                                counted(survey.files, "file"), human_bytes(survey.bytes))};
    if (survey.jobs.size() > 1) {
      finding.health = Health::note;
      finding.remedy = "jobs do not meet, but people mix them up: a directory a job, or --job where it matters";
    }
    const auto dead = std::count_if(survey.temporary.begin(), survey.temporary.end(),
                                    [](const workspace::SurveyEntry& entry) { return entry.writer == os::Life::dead; });
    if (dead != 0) {
      finding.health = Health::note;
      finding.remedy = fmt::format("{} of processes that are gone: muster gc --yes",
                                   counted(static_cast<std::uint64_t>(dead), "file"));
    }
    return finding;
  } catch (const Error& error) {
    return {"workspace", Health::bad, error.what(), "name a directory that all ranks see, and no other file"};
  }
}

Finding mount(const std::string& path) {
  Finding finding{"file system", Health::good, {}};
  try {
    const os::FileSystem system = os::file_system_of(path);
    finding.value = system.type;
    if (system.type.starts_with("0x"))
      finding.value += ", not known: treated like a network, read, not mapped";
    else if (system.is_network)
      finding.value += ", on other hosts too: read, not mapped";
  } catch (const Error& error) {
    return {"file system", Health::bad, error.what(), "look at the mount"};
  }
  const auto facts = os::mount_facts(path);
  if (!facts) return finding;
  finding.value += fmt::format("; {} on {} ({})", printable(facts->source), printable(facts->point), facts->options);
  const auto has = [&](std::string_view option) {
    const std::string list = "," + facts->options + ",";
    return list.find("," + std::string(option) + ",") != std::string::npos;
  };
  if (has("ro")) {
    finding.health = Health::bad;
    finding.remedy = "it is mounted read-only: ranks cannot write their states";
  } else if (has("soft")) {
    finding.health = Health::warning;
    finding.remedy = "a soft mount turns a slow server into errors in the middle of a file: mount it hard";
  } else if (has("nolock") || has("local_lock=all") || has("local_lock=flock")) {
    finding.health = Health::note;
    finding.remedy = "locks do not reach other hosts; no state depends on them";
  } else if (facts->type.starts_with("fuse")) {
    finding.health = Health::note;
    finding.remedy = "what is behind FUSE is not known; it is treated like a network";
  }
  return finding;
}

Finding space(const std::string& path) {
  const auto facts = os::space_facts(path);
  if (!facts) return {"space", Health::bad, "not known", "look at the mount"};
  Finding finding{"space", Health::good,
                  fmt::format("{} free of {}", human_bytes(facts->free_bytes), human_bytes(facts->total_bytes))};
  if (facts->total_files != 0) finding.value += fmt::format(", {} more files", facts->free_files);
  if (facts->free_bytes < little_space || (facts->total_files != 0 && facts->free_files < 1000)) {
    finding.health = Health::warning;
    finding.remedy = "a state needs the bytes of its tensors, and two generations are kept: make room (muster gc)";
  }
  return finding;
}

/// Makes a file and removes it: whether that can be done, and what the server's clock says.
std::vector<Finding> probe(const std::string& path) {
  using Clock = std::chrono::system_clock;
  const std::string name = join_path(path, workspace::probe_name());
  try {
    const Clock::time_point before = Clock::now();
    os::write_new_file(name, {});
    const Clock::time_point after = Clock::now();
    const std::optional<os::FileStatus> status = os::file_status(name);
    os::remove_file(name);
    if (!status) return {{"writing", Health::bad, "a file that was made is not there", "look at the mount"}};
    // Clocks of file systems go in ticks of some ms, so that a file may be older than the call that made it.
    constexpr auto tick = std::chrono::milliseconds(20);
    std::chrono::duration<double> skew{0};
    if (status->changed > after) skew = status->changed - after;
    if (status->changed + tick < before) skew = status->changed - before;
    Finding clock{"clock", Health::good, fmt::format("the server's is {:+.2f} s off this host's", skew.count())};
    if (std::abs(skew.count()) > 2) {
      clock.health = Health::warning;
      clock.remedy = "ages in muster ls are off by that; keep clocks together by NTP";
    }
    return {{"writing", Health::good, "a file can be made and removed"}, std::move(clock)};
  } catch (const Error& error) {
    return {{"writing", Health::bad, error.what(), "give this user the right to write there"}};
  }
}

Finding locks(const std::string& path) {
  try {
    if (os::try_lock(os::open_directory(path))) return {"locks", Health::good, "flock works"};
  } catch (const Error& error) {
    return {"locks", Health::note, error.what(), "no state depends on locks"};
  }
  return {"locks", Health::note, "flock does not work, or somebody has the lock",
          "nothing that Muster writes depends on locks"};
}

}  // namespace

std::vector<Finding> examine_workspace(const std::string& path) {
  std::vector<Finding> findings = {contents(path)};
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return findings;
  findings.push_back(mount(path));
  findings.push_back(space(path));
  for (Finding& finding : probe(path)) findings.push_back(std::move(finding));
  findings.push_back(locks(path));
  return findings;
}

}  // namespace muster::inspect
