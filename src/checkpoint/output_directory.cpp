// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/output_directory.hpp"

#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/log.hpp"
#include "src/core/quoted.hpp"
#include "src/os/directory.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view partial_mark = ".partial-";
// Between making a directory and locking it nobody else may take it for a dead process's.
constexpr auto youngest_leftover = std::chrono::minutes(1);

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

std::string parent_of(const std::string& path) {
  const fs::path parent = fs::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

// --force must not become `rm -r` of somebody's home: only what holds a model or shards is replaced.
bool looks_like_a_model(const fs::path& path) {
  bool empty = true;
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    empty = false;
    if (entry->path().extension() == ".safetensors") return true;
  }
  return empty && !error;
}

void remove_quietly(const std::string& path) noexcept {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) log(LogLevel::warning, "cannot remove \"" + path + "\": " + error.message());
}

/// Directories that nobody writes to any more, each with its lock taken.
struct Leftover {
  std::string path;
  os::Fd lock;
};
std::vector<Leftover> leftovers_of(const std::string& path, bool young_ones_too) {
  const std::string begins = fs::path(path).filename().string() + std::string(partial_mark);
  const auto now = fs::file_time_type::clock::now();
  std::vector<Leftover> dead;
  for (const fs::directory_entry& entry : fs::directory_iterator(parent_of(path))) {
    if (!entry.path().filename().string().starts_with(begins) || !entry.is_directory()) continue;
    if (!young_ones_too && now - entry.last_write_time() < youngest_leftover) continue;
    os::Fd lock = os::open_directory(entry.path().string());
    if (os::try_lock(lock)) dead.push_back({entry.path().string(), std::move(lock)});
  }
  return dead;
}

}  // namespace

void check_output(const std::string& path, bool force) {
  const std::string out = normal(path);
  std::error_code error;
  if (!fs::is_directory(parent_of(out), error)) {
    throw Error(ErrorKind::not_found,
                fmt::format("writing {}: the directory {} is not there; make it first", in_quotes(out),
                            in_quotes(parent_of(out))),
                {.path = out});
  }
  if (!fs::exists(fs::symlink_status(out, error))) return;
  if (!force) {
    throw Error(ErrorKind::argument,
                fmt::format("{} exists already; name another directory, or replace it with --force", in_quotes(out)),
                {.path = out});
  }
  if (fs::is_symlink(out, error) || !fs::is_directory(out, error) || !looks_like_a_model(out)) {
    throw Error(
        ErrorKind::argument,
        fmt::format("{} is not replaced, with --force neither: it is no directory with a model or shards in it; "
                    "name another directory",
                    in_quotes(out)),
        {.path = out});
  }
}

void check_not_source(const std::string& source, const std::string& out) {
  std::error_code error;
  if (fs::equivalent(source, out, error)) {
    throw Error(ErrorKind::argument,
                fmt::format("{} is read from and cannot be written to as well; name another directory", in_quotes(out)),
                {.path = out});
  }
}

OutputDirectory::OutputDirectory(const std::string& path, bool force,
                                 const std::function<bool(const std::string&)>& is_useful)
    : path_(normal(path)), force_(force) {
  check_output(path_, force_);
  try {
    for (Leftover& leftover : leftovers_of(path_, static_cast<bool>(is_useful))) {
      if (is_useful && partial_.empty() && is_useful(leftover.path)) {
        partial_ = leftover.path;
        lock_ = std::move(leftover.lock);
      } else if (fs::file_time_type::clock::now() - fs::last_write_time(leftover.path) >= youngest_leftover) {
        remove_quietly(leftover.path);
      }
    }
  } catch (const std::exception& error) {
    log(LogLevel::info, fmt::format("looking for leftovers of {}: {}", path_, error.what()));
  }
  if (!partial_.empty()) return;
  partial_ = path_ + std::string(partial_mark) + os::random_hex(8);
  os::make_directory(partial_);
  try {
    lock_ = os::open_directory(partial_);
  } catch (...) {
    remove_quietly(partial_);
    throw;
  }
  os::try_lock(lock_);
}

OutputDirectory::~OutputDirectory() {
  if (!partial_.empty() && !keep_) remove_quietly(partial_);
}

void OutputDirectory::commit() {
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(partial_)) {
    if (entry.is_directory()) os::sync_directory(entry.path().string());
    if (entry.is_regular_file()) os::sync_file(entry.path().string());
  }
  os::sync_directory(partial_);
  check_output(path_, force_);
  std::error_code error;
  if (!force_ || !fs::exists(path_, error)) {
    os::rename_to_new(partial_, path_);
    partial_.clear();
  } else if (!os::exchange_names(partial_, path_)) {
    // Two renames where the file system knows no exchange: for a moment OUT is missing, but never half.
    const std::string old = path_ + std::string(partial_mark) + os::random_hex(8);
    os::rename_to_new(path_, old);
    try {
      os::rename_to_new(partial_, path_);
    } catch (...) {
      os::rename_to_new(old, path_);
      throw;
    }
    partial_ = old;
  }
  // From here on partial_ is the old directory, if there was one: what is left to do is to remove it.
  os::sync_directory(parent_of(path_));
  if (!partial_.empty()) remove_quietly(std::exchange(partial_, {}));
}

}  // namespace muster
