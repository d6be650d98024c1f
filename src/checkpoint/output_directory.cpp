// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/output_directory.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/log.hpp"
#include "muster/model_dir.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/core/quoted.hpp"
#include "src/os/directory.hpp"
#include "src/os/publish.hpp"

namespace muster {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_named = 3;

// "out/" and "out/." are "out": siblings are named after it.
std::string normal(const std::string& path) {
  if (path.empty()) throw Error(ErrorKind::argument, "the output directory has no name");
  fs::path clean = fs::path(path).lexically_normal();
  if (!clean.has_filename()) clean = clean.parent_path();
  if (!clean.has_filename() || clean.filename() == "." || clean.filename() == "..") {
    throw Error(ErrorKind::argument, fmt::format("the output directory cannot be {}; name a new one", in_quotes(path)));
  }
  return clean.string();
}

// --force must not become `rm -r` of somebody's home: only a checkpoint is replaced, and nothing beside it goes with
// it.
void check_replaceable(const std::string& out, const std::string& source) {
  const auto refuse = [&](const std::string& words) {
    throw Error(ErrorKind::argument,
                fmt::format("{} is not replaced, not even with --force: {}", in_quotes(out), words), {.path = out});
  };
  const auto status = os::file_status(out);
  if (!status || !status->is_directory) refuse("it is not a directory; name another one");
  std::vector<std::string> carried;
  if (!source.empty()) carried = carried_files(source, "all").names;
  std::vector<std::string> foreign;
  bool is_empty = true;
  bool has_weights = false;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(out, error), end; !error && entry != end && foreign.size() <= most_named;
       entry.increment(error)) {
    is_empty = false;
    if (entry->is_directory() && !entry->is_symlink()) continue;
    const std::string name = fs::path(entry->path().native().substr(out.size() + 1)).string();
    const Belongs belongs = belongs_to_checkpoint(name);
    has_weights = has_weights || belongs == Belongs::weights;
    if (belongs == Belongs::no && !std::ranges::binary_search(carried, name)) foreign.push_back(in_quotes(name));
  }
  if (error) throw Error(ErrorKind::io, fmt::format("reading the directory {}: {}", in_quotes(out), error.message()));
  if (is_empty) return;
  if (!foreign.empty()) {
    if (foreign.size() > most_named) foreign.back() = "others";
    refuse(fmt::format("it has files that are no part of a checkpoint ({}); move them away, or name another directory",
                       fmt::join(foreign, ", ")));
  }
  if (!has_weights) refuse("it has no model and no shards in it; name another directory");
}

void remove_quietly(const std::string& path) noexcept {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) log(LogLevel::warning, "cannot remove \"" + path + "\": " + error.message());
}

/// The newest change of a directory or of what is right in it.
std::chrono::system_clock::time_point newest_change(const std::string& directory) {
  std::chrono::system_clock::time_point newest{};
  const auto look = [&](const std::string& path) {
    if (const auto status = os::file_status(path)) newest = std::max(newest, status->changed);
  };
  try {
    look(directory);
    for (const os::DirectoryEntry& entry : os::list_directory(directory)) look(join_path(directory, entry.name));
  } catch (const Error&) {
    return std::chrono::system_clock::time_point::max();  // somebody has taken it at this moment
  }
  return newest;
}

/// `now` is by the clock of the file system.
bool is_nobodys(const os::Unfinished& one, const OutputChoice& choice, std::chrono::system_clock::time_point now) {
  if (one.writer.pid == 0) return true;
  const os::Life life = os::life_of(one.writer);
  if (life != os::Life::unknown) return life == os::Life::dead;
  if (choice.abandoned_after && now - newest_change(one.path) >= *choice.abandoned_after) return true;
  log(LogLevel::warning,
      fmt::format("{} belongs to a process of host {} (pid {}), of which nothing can be known from here; if that has "
                  "ended, {}, or say --abandoned-after",
                  in_quotes(one.path), one.writer.host, one.writer.pid,
                  one.is_replaced ? "it is the earlier model: rename it back" : "remove it"));
  return false;
}

}  // namespace

void check_output(const std::string& path, const OutputChoice& choice) {
  const std::string out = normal(path);
  const std::string parent = os::directory_of(out);
  std::error_code error;
  if (!fs::is_directory(parent, error)) {
    throw Error(
        ErrorKind::not_found,
        fmt::format("writing {}: the directory {} is not there; make it first", in_quotes(out), in_quotes(parent)),
        {.path = out});
  }
  if (!fs::exists(fs::symlink_status(out, error))) return;
  if (!choice.force) {
    throw Error(ErrorKind::argument,
                fmt::format("{} exists already; name another directory, or replace it with --force", in_quotes(out)),
                {.path = out});
  }
  check_replaceable(out, choice.source);
}

void check_not_source(const std::string& source, const std::string& out) {
  std::error_code error;
  const fs::path inside = fs::weakly_canonical(source, error).lexically_relative(fs::weakly_canonical(out, error));
  if (!error && !inside.empty() && *inside.begin() != "..") {
    throw Error(ErrorKind::argument,
                fmt::format("{} is read from and cannot be written to as well; name another directory", in_quotes(out)),
                {.path = out});
  }
}

OutputDirectory::OutputDirectory(const std::string& path, OutputChoice choice,
                                 const std::function<bool(const std::string&)>& is_useful)
    : path_(normal(path)), choice_(std::move(choice)) {
  check_output(path_, choice_);
  partial_ = os::partial_name(path_);
  if (!os::make_directory(partial_)) throw os::errno_error("making the directory", EEXIST, partial_);
  try {
    look_at_others(is_useful);
    check_output(path_, choice_);
  } catch (...) {
    remove_quietly(partial_);
    throw;
  }
}

void OutputDirectory::look_at_others(const std::function<bool(const std::string&)>& is_useful) {
  const auto status = os::file_status(partial_);
  std::vector<os::Unfinished> others;
  try {
    others = os::unfinished_of(path_);
  } catch (const Error& error) {
    // One may write to a directory that one may not list.
    log(LogLevel::info, fmt::format("looking for what others left beside {}: {}", in_quotes(path_), error.what()));
  }
  std::set<std::string> growing;
  for (const os::Unfinished& one : others)
    if (!one.is_replaced) growing.insert(one.tail);
  std::erase_if(others, [&](const os::Unfinished& one) {
    return one.path == partial_ || !status || !is_nobodys(one, choice_, status->changed);
  });
  std::set<std::string> in_doubt;
  std::erase_if(others, [&](const os::Unfinished& one) {
    if (!one.is_replaced) return false;
    if (!os::file_status(path_)) {
      os::rename_to_new(one.path, path_);
      log(LogLevel::warning, fmt::format("{} has its name again: who was to replace it was killed", in_quotes(path_)));
      return true;
    }
    // What grew is gone: it has the name now, and the earlier one is only to be removed.
    if (!growing.contains(one.tail)) return false;
    log(LogLevel::warning,
        fmt::format("{} is an earlier {}, which has come from elsewhere since; move one of them away",
                    in_quotes(one.path), in_quotes(path_)));
    in_doubt.insert(one.tail);
    return true;
  });
  std::erase_if(others, [&](const os::Unfinished& one) { return in_doubt.contains(one.tail); });
  bool is_taken = false;
  for (const os::Unfinished& one : others) {
    const std::string mine = os::partial_name(path_);
    try {
      os::rename_to_new(one.path, mine);
    } catch (const Error&) {
      continue;  // another export was the first to take it
    }
    if (!is_taken && !one.is_replaced && is_useful && is_useful(mine)) {
      remove_quietly(std::exchange(partial_, mine));
      is_taken = true;
    } else {
      remove_quietly(mine);
    }
  }
}

OutputDirectory::~OutputDirectory() {
  if (partial_.empty()) return;
  std::error_code error;
  if (keep_)
    fs::rename(partial_, os::released_name(partial_), error);
  else
    remove_quietly(partial_);
}

void OutputDirectory::commit(const std::function<void()>& at_last) {
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(partial_)) {
    if (entry.is_directory()) os::sync_directory(entry.path().string());
    if (entry.is_regular_file()) os::sync_file(entry.path().string());
  }
  check_output(path_, choice_);
  if (at_last) at_last();
  os::sync_directory(partial_);
  if (!choice_.force || !os::file_status(path_)) {
    os::rename_to_new(partial_, path_);
    partial_.clear();
  } else {
    partial_ = os::replace_directory(partial_, path_);
  }
  // From here on partial_ is the old directory, if there was one: what is left to do is to remove it.
  keep_ = false;
  os::sync_directory(os::directory_of(path_));
  if (!partial_.empty()) remove_quietly(std::exchange(partial_, {}));
}

}  // namespace muster
