// SPDX-License-Identifier: Apache-2.0
#include "src/workspace/discovery.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <string_view>
#include <thread>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/clock.hpp"
#include "src/os/directory.hpp"
#include "src/os/file.hpp"
#include "src/os/publish.hpp"
#include "src/statefile/format.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {
namespace {

using Clock = os::Clock;
using std::chrono::microseconds;

constexpr auto longest_here = std::chrono::seconds(2);
constexpr auto longest_wrong = std::chrono::seconds(90);

bool is_on_network(const std::string& directory) noexcept {
  try {
    return os::file_system_of(directory).is_network;
  } catch (const Error&) {
    return true;
  }
}

constexpr std::string_view version_key = "muster_workspace";
constexpr std::uint64_t longest_mark = 64 << 10;

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

void make_directories(const std::string& path) {
  const std::string parent = without_slash(os::directory_of(path));
  bool is_new = false;
  try {
    is_new = os::make_directory(path);
  } catch (const Error& error) {
    if (error.os_error() != ENOENT || parent == path) throw;
    make_directories(parent);
    is_new = os::make_directory(path);
  }
  if (is_new) os::sync_directory(parent);
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(ErrorKind::invalid_argument, fmt::format("workspace {}: {}", in_quotes(path), why), {.path = path});
}

void require_directory(const std::string& path) {
  const auto status = os::file_status(path, os::Links::followed);
  if (status && !status->is_directory) refuse(path, "it is a file. Pass a directory");
  if (status) return;
  const auto itself = os::file_status(path);
  if (itself && itself->is_link) refuse(path, "it is a link to a path that does not exist");
  make_directories(path);
}

/// Writes the marker file. `lost`: replaces an existing marker that is empty.
void write_mark(const std::string& path, bool lost) {
  const std::string text = to_json(Config::object({{version_key, workspace_version}, {"made_by", "muster"}}), 2) + "\n";
  try {
    const std::string mark = path + "/" + file_name({.kind = NameKind::mark});
    if (lost)
      os::publish(mark, std::as_bytes(std::span(text)), growing_name(), os::Durability::synced);
    else
      os::publish_first(mark, std::as_bytes(std::span(text)), growing_name(), os::Durability::synced);
  } catch (const Error& error) {
    throw error.with_context(fmt::format("{}: making the workspace", in_quotes(path)));
  }
}

/// Whether a stale cache can cause the error: no such file, ESTALE, or bytes that contradict their format.
bool may_be_a_cache(const Error& error) noexcept {
  return error.os_error() == ENOENT || error.os_error() == ESTALE || error.kind() == ErrorKind::corrupt ||
         error.kind() == ErrorKind::not_found;
}

}  // namespace

Pauses::Pauses(bool is_network) noexcept
    : pause_(is_network ? 1000 : 50), longest_(is_network ? 250'000 : 10'000), patient_(is_network ? 4000 : 10'000) {}

void Pauses::sleep(std::chrono::nanoseconds longest) noexcept {
  std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause_, longest));
  pause_ = std::min(longest_, pause_ * 3 / 2);
}

bool Pauses::is_patient() const noexcept {
  return pause_ >= patient_;
}

std::optional<os::FileStatus> probe(const std::string& directory) {
  const std::string file = directory + "/" + probe_name();
  os::write_new_file(file, {});
  const auto status = os::file_status(file);
  os::remove_file(file);
  return status;
}

bool refresh(const std::string& directory) {
  try {
    probe(directory);
    return true;
  } catch (const Error& error) {
    const int code = error.os_error();
    if (code == EACCES || code == EPERM || code == EROFS || code == ENOSPC || code == EDQUOT) return false;
    throw;
  }
}

std::vector<os::DirectoryEntry> fresh_listing(const std::string& directory, bool is_network) {
  if (is_network) refresh(directory);
  return os::list_directory(directory);
}

void patiently(const std::string& path, const Patience& patience, const std::function<void()>& attempt) {
  const std::string directory = os::directory_of(path);
  const Clock::time_point begin = Clock::now();
  std::optional<bool> is_network;
  std::optional<Pauses> pauses;
  for (int tries = 1;; ++tries) {
    try {
      attempt();
      return;
    } catch (const Error& error) {
      if (!may_be_a_cache(error)) throw;
      if (!is_network) {
        is_network = is_on_network(directory);
        pauses.emplace(*is_network);
      }
      Clock::time_point deadline = patience.deadline;
      if (error.os_error() != ESTALE) {
        if (!*is_network) deadline = std::min(deadline, begin + longest_here);
        if (error.kind() == ErrorKind::corrupt) deadline = std::min(deadline, begin + longest_wrong);
        // Wrong contents on a local disk will not become right later.
        if (error.kind() == ErrorKind::corrupt && !*is_network && tries > 1) deadline = begin;
      }
      if (Clock::now() >= deadline) {
        const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
        if (tries == 1) throw;
        throw error.with_context(fmt::format("tried {} times in {:.1f} s", tries, seconds));
      }
    }
    if (patience.check) patience.check();
    group::check_interrupted("waiting for files of other ranks");
    pauses->sleep();
    try {
      fresh_listing(directory, *is_network);
    } catch (const Error& error) {
      // A missing directory is reported only after the deadline, because a cache may hide it until then.
      if (error.kind() == ErrorKind::not_found && Clock::now() >= patience.deadline) throw;
      // No descriptor is left. The listing only refreshes caches, so it may be skipped.
      if (error.os_error() == EMFILE || error.os_error() == ENFILE) continue;
      if (!may_be_a_cache(error)) throw;
    }
  }
}

void refuse_other_files(const std::string& workspace, const std::string& file) {
  throw Error(ErrorKind::invalid_argument,
              fmt::format("{} is not a Muster workspace: it contains other files (e.g. {}) and no {}. Pass an empty "
                          "directory or an existing workspace",
                          in_quotes(workspace), in_quotes(file), file_name({.kind = NameKind::mark})),
              {.path = workspace});
}

bool check_mark(const std::string& workspace) {
  const std::string path = workspace + "/" + file_name({.kind = NameKind::mark});
  const auto deadline = os::Clock::now() + std::chrono::seconds(10);
  bool is_empty = false;
  const auto check = [&] {
    is_empty = false;
    const auto bytes = os::read_small_file(path, longest_mark);
    is_empty = statefile::is_zero(bytes);
    std::int64_t version = 0;
    try {
      version = parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}).at(version_key).as_int();
    } catch (const Error& error) {
      throw Error(ErrorKind::corrupt,
                  fmt::format("workspace {}: the marker file is corrupted ({}). If no file of the workspace is needed, "
                              "delete the directory",
                              in_quotes(workspace), error.what()),
                  {.path = path});
    }
    if (version < 1 || version > workspace_version)
      throw Error(ErrorKind::version,
                  fmt::format("workspace {} has version {}, and this Muster supports version {}. Use a newer Muster, "
                              "or another directory",
                              in_quotes(workspace), version, workspace_version),
                  {.path = path});
  };
  try {
    patiently(path, {.deadline = deadline}, check);
  } catch (const Error&) {
    if (!is_empty) throw;
  }
  return !is_empty;
}

WorkspaceDirectory prepare_workspace(const std::string& given) {
  if (given.empty()) throw Error(ErrorKind::invalid_argument, "a workspace needs a path: the path is empty");
  WorkspaceDirectory workspace;
  workspace.path = without_slash(given);
  require_directory(workspace.path);
  workspace.is_network = os::file_system_of(workspace.path).is_network;
  const auto entries = fresh_listing(workspace.path, workspace.is_network);
  const std::string mark = file_name({.kind = NameKind::mark});
  if (std::ranges::find(entries, mark, &os::DirectoryEntry::name) != entries.end()) {
    if (!check_mark(workspace.path)) write_mark(workspace.path, true);
    return workspace;
  }
  std::string foreign;
  for (const os::DirectoryEntry& entry : entries) {
    if (parse_name(entry.name)) {
      foreign.clear();
      break;
    }
    foreign = entry.name;
  }
  if (!foreign.empty()) refuse_other_files(workspace.path, foreign);
  write_mark(workspace.path, false);
  return workspace;
}

}  // namespace muster::workspace
