// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/model/output_directory.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "muster/error.hpp"
#include "muster/log.hpp"
#include "muster/model_dir.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/core/thread_pool.hpp"
#include "src/os/directory.hpp"
#include "src/os/publish.hpp"
#include "src/statefile/format.hpp"

namespace muster {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_files_named = 3;

// Normalises "out/" and "out/." to "out", because siblings are named after it.
std::string normal(const std::string& path) {
  if (path.empty()) throw Error(ErrorKind::invalid_argument, "the output directory has no name");
  fs::path clean = fs::path(path).lexically_normal();
  if (!clean.has_filename()) clean = clean.parent_path();
  if (!clean.has_filename() || clean.filename() == "." || clean.filename() == "..")
    throw Error(ErrorKind::invalid_argument,
                fmt::format("the output directory cannot be {}. Pass a new directory", in_quotes(path)));
  return clean.string();
}

constexpr std::uint64_t longest_list = std::uint64_t{1} << 26;

/// Returns the digest of a file for the directory's list of files.
std::string digest_of(const std::string& path) {
  const auto file = os::MappedFile::open(path);
  const XXH128_hash_t hash = XXH3_128bits(file->bytes().data(), file->bytes().size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

/// Returns names and digests of the files that an earlier command wrote there; nullopt if there is no list.
std::optional<std::map<std::string, std::string, std::less<>>> read_written(const std::string& directory) {
  const std::string path = join_path(directory, std::string(written_files_name));
  if (!os::file_status(path)) return std::nullopt;
  const std::string text = read_text(path, longest_list);
  try {
    const Config list = parse_json(text);
    std::map<std::string, std::string, std::less<>> files;
    for (const auto& [name, digest] : list.at("files").as_object()) files.emplace(name, digest.as_string());
    return files;
  } catch (const Error&) {
    return std::nullopt;
  }
}

/// Calls work(relative name, entry) for everything in a directory except folders.
template <class Work>
void for_each_file(const std::string& directory, const Work& work) {
  std::error_code error;
  for (fs::recursive_directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error))
    if (!entry->is_directory() || entry->is_symlink())
      work(fs::path(entry->path().native().substr(directory.size() + 1)).string(), *entry);
  if (error)
    throw Error(ErrorKind::io, fmt::format("{}: reading the directory: {}", in_quotes(directory), error.message()));
}

/// Whether a file is replaced together with the model: weights, and files that only describe them.
bool is_of_weights(const std::string& name) {
  return belongs_to_checkpoint(name) == Belongs::weights || name == checksums_file_name || name == written_files_name ||
         is_journal_name(name) || os::is_partial_name(name);
}

// --force must not become `rm -r`: it deletes only weights, and files that a command of Muster wrote and that have not
// changed since.
void check_replaceable(const std::string& out) {
  const auto refuse = [&](const std::string& words) {
    throw Error(ErrorKind::invalid_argument,
                fmt::format("{} is not replaced, not even with --force: {}", in_quotes(out), words), {.path = out});
  };
  const auto status = os::file_status(out);
  if (!status || !status->is_directory) refuse("it is not a directory. Pass another directory");
  const auto written = read_written(out);
  std::vector<std::string> kept;
  bool is_empty = true;
  bool has_weights = false;
  for_each_file(out, [&](const std::string& name, const fs::directory_entry& entry) {
    is_empty = false;
    if (is_of_weights(name)) {
      has_weights = has_weights || belongs_to_checkpoint(name) == Belongs::weights;
      return;
    }
    // A model of another program has at least its config.json.
    if (!written && name == "config.json") return;
    if (kept.size() > most_files_named) return;
    const auto is_listed = [&] {
      const auto listed = written->find(name);
      return listed != written->end() && !entry.is_symlink() && entry.is_regular_file() &&
             digest_of(entry.path().string()) == listed->second;
    };
    if (!written || !is_listed()) kept.push_back(in_quotes(name));
  });
  if (is_empty) return;
  if (!kept.empty()) {
    if (kept.size() > most_files_named) kept.back() = "others";
    refuse(
        fmt::format("it has files that Muster did not write, or that were changed since ({}). Move them away, or pass "
                    "another directory",
                    fmt::join(kept, ", ")));
  }
  if (!has_weights) refuse("it has no model and no shards. Pass another directory");
}

/// Lists the files written next to the weights, so that a later --force can distinguish them from files of the user.
void list_written(const std::string& directory) {
  Config files = Config::object();
  for_each_file(directory, [&](const std::string& name, const fs::directory_entry& entry) {
    if (!is_of_weights(name)) files[name] = digest_of(entry.path().string());
  });
  if (files.size() == 0) return;
  write_file(join_path(directory, std::string(written_files_name)),
             to_json(Config::object({{"muster_files", 1}, {"files", std::move(files)}}), 2) + "\n");
}

/// Gives everything in `made` the mode, owner and group of its counterpart in `old`. A new file gets the permissions
/// that all files of the old directory share.
void keep_rights(const std::string& old, const std::string& made, const os::Rights& directory) {
  std::optional<os::Rights> common;
  for_each_file(old, [&](const std::string&, const fs::directory_entry& entry) {
    if (entry.is_symlink() || !entry.is_regular_file()) return;
    const os::Rights rights = os::rights_of(entry.path().string()).value_or(directory);
    if (!common) common = rights;
    common->mode &= rights.mode;
    if (common->group != rights.group) common->mode &= 0707U;
  });
  for_each_file(made, [&](const std::string& name, const fs::directory_entry& entry) {
    std::error_code error;
    const std::string same = join_path(old, name);
    const bool is_there = fs::is_regular_file(fs::symlink_status(same, error));
    if (const auto rights = is_there ? os::rights_of(same) : common) os::set_rights(entry.path().string(), *rights);
  });
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(made)) {
    if (!entry.is_directory() || entry.is_symlink()) continue;
    std::error_code error;
    const std::string same = join_path(old, entry.path().native().substr(made.size() + 1));
    const bool is_there = fs::is_directory(fs::symlink_status(same, error));
    os::set_rights(entry.path().string(), is_there ? os::rights_of(same).value_or(directory) : directory);
  }
}

/// Returns the newest change of a directory or of its direct entries.
std::chrono::system_clock::time_point newest_change(const std::string& directory) {
  std::chrono::system_clock::time_point newest{};
  const auto look = [&](const std::string& path) {
    if (const auto status = os::file_status(path)) newest = std::max(newest, status->changed);
  };
  try {
    look(directory);
    for (const os::DirectoryEntry& entry : os::list_directory(directory)) look(join_path(directory, entry.name));
  } catch (const Error&) {
    return std::chrono::system_clock::time_point::max();  // another process has just claimed it
  }
  return newest;
}

/// `now` is by the clock of the file system.
bool is_nobodys(const os::Unfinished& one, const OutputChoice& choice, std::chrono::system_clock::time_point now) {
  if (one.writer.pid == 0) return true;
  const os::Life life = os::life_of(one.writer);
  if (life != os::Life::unknown) return life == os::Life::dead;
  if (choice.stale_after && now - newest_change(one.path) >= *choice.stale_after) return true;
  log(LogLevel::warning,
      fmt::format("Leftover {}: its writer (pid {} on host {}) cannot be checked from this host. If that process has "
                  "ended, {} or pass --stale-after AGE",
                  in_quotes(one.path), one.writer.pid, one.writer.host,
                  one.is_replaced ? "rename it back (it is the earlier model)" : "delete it"));
  return false;
}

constexpr std::string_view journal_prefix = "muster-export.";
constexpr std::string_view begin_name = "muster-export.json";
constexpr std::uint64_t longest_journal = std::uint64_t{1} << 32;

std::string lines_name(int rank) {
  return fmt::format("{}{}.jsonl", journal_prefix, rank);
}

std::uint64_t length_of(const std::string& path) {
  const auto status = os::file_status(path);
  return status ? status->bytes : 0;
}

os::WritableFile open_or_create(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error) ? os::WritableFile::open(path, path) : os::WritableFile::create(path, path);
}

std::vector<WrittenPart> parse_parts(const Config& list) {
  std::vector<WrittenPart> parts;
  for (const Config& item : list.as_array()) {
    WrittenPart& part = parts.emplace_back();
    part.offset = static_cast<std::uint64_t>(item.at(std::size_t{0}).as_int());
    part.bytes = static_cast<std::uint64_t>(item.at(std::size_t{1}).as_int());
    const std::string& hash = item.at(std::size_t{2}).as_string();
    if (std::from_chars(hash.data(), hash.data() + hash.size(), part.hash, 16).ptr != hash.data() + hash.size())
      throw Error(ErrorKind::corrupt, "malformed journal: a hash is not a number");
  }
  return parts;
}

std::string parts_line(const std::string& file, const std::vector<WrittenPart>& parts) {
  ConfigArray list;
  for (const WrittenPart& part : parts)
    list.push_back(Config::array({static_cast<std::int64_t>(part.offset), static_cast<std::int64_t>(part.bytes),
                                  fmt::format("{:016x}", part.hash)}));
  return to_json(Config::object({{"file", file}, {"parts", std::move(list)}})) + "\n";
}

std::string finished_line(const std::string& file) {
  return to_json(Config::object({{"finished", file}})) + "\n";
}

}  // namespace

void check_output(const std::string& path, const OutputChoice& choice) {
  const std::string out = normal(path);
  const std::string parent = os::directory_of(out);
  std::error_code error;
  if (!fs::is_directory(parent, error))
    throw file_error(ErrorKind::not_found, "writing", out,
                     fmt::format("the directory {} does not exist. Make it first", in_quotes(parent)));
  if (!fs::exists(fs::symlink_status(out, error))) return;
  if (!choice.force)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("{} already exists. Pass another directory, or --force to replace it", in_quotes(out)),
                {.path = out});
  check_replaceable(out);
}

void check_not_source(const std::string& source, const std::string& out) {
  if (is_inside(source, out))
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format("{} is part of the source and cannot be the output. Pass another directory", in_quotes(out)),
        {.path = out});
}

void remove_quietly(const std::string& path) noexcept {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) log(LogLevel::warning, fmt::format("{}: deleting: {}", in_quotes(path), error.message()));
}

void remove_dead_outputs(const std::string& path, const OutputChoice& choice) {
  const auto now = std::chrono::system_clock::now();
  for (const os::Unfinished& one : os::unfinished_of(path)) {
    if (one.is_replaced || !is_nobodys(one, choice, now)) continue;
    const std::string mine = os::partial_name(path);
    try {
      os::rename_to_new(one.path, mine);
    } catch (const Error&) {
      continue;  // another process has claimed it first
    }
    remove_quietly(mine);
  }
}

OutputDirectory::OutputDirectory(const std::string& path, OutputChoice choice,
                                 const std::function<bool(const std::string&)>& is_useful)
    : path_(normal(path)), choice_(std::move(choice)) {
  check_output(path_, choice_);
  partial_ = os::partial_name(path_);
  if (!os::make_directory(partial_)) throw os::errno_error("making the directory", EEXIST, partial_);
  try {
    // The unfinished directory must not be accessible to more users than the one that it replaces.
    if (auto old = choice_.force ? os::rights_of(path_) : std::nullopt) {
      old->mode |= 0700U;
      os::set_rights(partial_, *old);
    }
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
    // A directory may be writable but not listable.
    log(LogLevel::info,
        fmt::format("{}: searching for leftover outputs of other processes: {}", in_quotes(path_), error.what()));
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
      log(LogLevel::warning,
          fmt::format("{} is restored: the process that was replacing it was killed", in_quotes(path_)));
      return true;
    }
    // The unfinished directory no longer exists: it has the final name now, and the earlier directory must be removed.
    if (!growing.contains(one.tail)) return false;
    log(LogLevel::warning,
        fmt::format("{} is an earlier version of {}, which another program has made since. Move one of them away",
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
      continue;  // another export has claimed it first
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
  list_written(partial_);
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(partial_)) {
    if (entry.is_directory()) os::sync_directory(entry.path().string());
    if (entry.is_regular_file()) os::sync_file(entry.path().string());
  }
  check_output(path_, choice_);
  if (at_last) at_last();
  const auto old = choice_.force ? os::rights_of(path_) : std::nullopt;
  if (old) {
    keep_rights(path_, partial_, *old);
    os::set_rights(partial_, *old);
  }
  os::sync_directory(partial_);
  if (!old) {
    os::rename_to_new(partial_, path_);
    partial_.clear();
  } else {
    partial_ = os::replace_directory(partial_, path_);
  }
  // From here on partial_ is the old directory, if there was one, which must still be removed.
  keep_ = false;
  os::sync_directory(os::directory_of(path_));
  if (!partial_.empty()) remove_quietly(std::exchange(partial_, {}));
}

bool is_journal_name(std::string_view name) noexcept {
  return name.starts_with(journal_prefix) && (name == begin_name || name.ends_with(".jsonl"));
}

void begin_journal(const std::string& directory, const std::string& fingerprint) {
  write_file(directory + "/" + std::string(begin_name),
             to_json(Config::object({{"muster_export", 1}, {"fingerprint", fingerprint}})) + "\n");
}

void rewrite_journal(const std::string& directory, const FinishedFiles& finished) {
  std::string text;
  for (const auto& [file, parts] : finished) text += parts_line(file, parts) + finished_line(file);
  write_file(directory + "/" + lines_name(0), text);
  std::vector<fs::path> others;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (is_journal_name(name) && name != begin_name && name != lines_name(0)) others.push_back(entry.path());
  }
  for (const fs::path& other : others) fs::remove(other);
}

void remove_journal(const std::string& directory) {
  std::vector<fs::path> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    if (is_journal_name(entry.path().filename().string())) names.push_back(entry.path());
  for (const fs::path& name : names) fs::remove(name);
}

Journal::Journal(const std::string& directory, int rank)
    : length_(length_of(directory + "/" + lines_name(rank))),
      file_(open_or_create(directory + "/" + lines_name(rank))) {}

void Journal::add_parts(const std::string& file, const std::vector<WrittenPart>& parts) {
  add(parts_line(file, parts));
}

void Journal::add_finished(const std::string& file) {
  add(finished_line(file));
}

void Journal::add(const std::string& text) {
  const std::lock_guard lock(mutex_);
  file_.write_at(length_, std::as_bytes(std::span(text)));
  file_.sync();
  length_ += text.size();
}

std::optional<FinishedFiles> read_journal(const std::string& directory, const std::string& fingerprint) {
  try {
    const Config begin = parse_json(read_text(directory + "/" + std::string(begin_name), longest_journal));
    if (begin.at("muster_export").as_int() != 1 || begin.at("fingerprint").as_string() != fingerprint)
      return std::nullopt;
    FinishedFiles parts;
    std::set<std::string> finished;
    for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
      const std::string name = entry.path().filename().string();
      if (!is_journal_name(name) || name == begin_name) continue;
      const std::string text = read_text(entry.path().string(), longest_journal);
      std::size_t at = 0;
      for (std::size_t end = text.find('\n'); end != std::string::npos; at = end + 1, end = text.find('\n', at)) {
        const Config line = parse_json(std::string_view(text).substr(at, end - at));
        if (const Config* file = line.as_object().find("finished")) {
          finished.insert(file->as_string());
          continue;
        }
        auto& known = parts[line.at("file").as_string()];
        for (const WrittenPart& part : parse_parts(line.at("parts"))) known.push_back(part);
      }
    }
    FinishedFiles contents;
    for (const std::string& file : finished) {
      std::vector<WrittenPart>& all = parts[file];
      std::ranges::sort(all, {}, [](const WrittenPart& part) { return std::tie(part.offset, part.bytes, part.hash); });
      all.erase(std::unique(all.begin(), all.end()), all.end());
      contents.emplace(file, std::move(all));
    }
    return contents;
  } catch (const std::exception&) {
    // The journal is missing or unreadable, so the state of the directory is unknown.
    return std::nullopt;
  }
}

std::string verify_file(const std::string& path, const std::string& header, std::uint64_t bytes,
                        std::vector<WrittenPart> parts) {
  try {
    const auto file = os::MappedFile::open(path);
    const std::span<const std::byte> all = file->bytes();
    if (all.size() != bytes) return fmt::format("the file has {} bytes, expected {}", all.size(), bytes);
    if (bytes < header.size() || std::memcmp(all.data(), header.data(), header.size()) != 0)
      return "the header differs";
    std::ranges::sort(parts, {}, &WrittenPart::offset);
    std::uint64_t covered = header.size();
    for (const WrittenPart& part : parts) {
      if (part.offset > bytes || part.bytes > bytes - part.offset) return "a part of the journal is out of range";
      if (part.offset < covered) return fmt::format("the journal has two parts at offset {}", part.offset);
      // Bytes that no part covers must be zero: they are padding.
      if (!statefile::is_zero(all.subspan(covered, part.offset - covered)))
        return fmt::format("the bytes at offset {} are not in the journal", covered);
      covered = part.offset + part.bytes;
    }
    if (!statefile::is_zero(all.subspan(covered)))
      return fmt::format("the bytes at offset {} are not in the journal", covered);
    std::atomic<std::uint64_t> differs{bytes};
    parallel_for(parts.size(), copy_workers(), [&](std::size_t i, std::size_t) {
      const auto part = all.subspan(parts[i].offset, parts[i].bytes);
      os::populate_mapped(part, path);
      if (XXH3_64bits(part.data(), part.size()) != parts[i].hash) differs = parts[i].offset;
      os::forget_mapped(part);
    });
    return differs == bytes ? std::string()
                            : fmt::format("checksum mismatch at offset {}: data is corrupted", differs.load());
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace muster
