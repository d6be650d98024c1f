// SPDX-License-Identifier: Apache-2.0
#pragma once
// OutputDirectory: a directory of results that appears complete or not at all.
//
// 1. OUT.partial-NONCE@WRITER (os/publish.hpp) is created next to OUT, and all files are written into it.
// 2. Leftovers of other runs next to OUT are deleted if their writer is proved dead: a process of this host that no
//    longer exists, or that released the directory. The death of a process on another host cannot be proved. Its
//    leftovers are deleted if nothing in them has changed for an age that the user gives. The first process to claim
//    such a directory renames it, and then removes or resumes it. An OUT.replaced-... is renamed to OUT if OUT does not
//    exist.
// 3. commit() lists the files next to the weights (written_files_name), syncs all files and directories, and renames
// the
//    directory to OUT in one step. An OUT that is replaced passes its modes, owner and group to the new directory,
//    exchanges names with it, and is then removed. If the file system cannot exchange names, OUT is first renamed to
//    OUT.replaced-NONCE@WRITER: one of the two always exists, and step 2 of the next run finds it.
// 4. Without a commit the destructor removes OUT.partial-..., or releases it if keep_on_failure() was called.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/os/file.hpp"

namespace muster {

/// The list in a written directory: {"muster_files": 1, "files": {NAME: DIGEST, ...}}, all files except weights.
/// --force deletes a file next to the weights only if it is listed and unchanged.
inline constexpr std::string_view written_files_name = ".muster.files.json";

struct OutputChoice {
  bool force = false;
  /// Leftovers of processes on other hosts that have not changed for this long may be deleted.
  std::optional<std::chrono::seconds> stale_after = {};
};

class OutputDirectory {
 public:
  /// Throws as check_output; Error(io | out_of_space) from the file system. `is_useful`, if given, inspects each
  /// leftover directory; the first one that it accepts is resumed.
  explicit OutputDirectory(const std::string& path, OutputChoice choice = {},
                           const std::function<bool(const std::string& partial)>& is_useful = {});
  OutputDirectory& operator=(OutputDirectory&&) = delete;
  ~OutputDirectory();

  /// The directory to write to until commit().
  [[nodiscard]] const std::string& partial() const noexcept { return partial_; }
  /// Makes the destructor keep the unfinished directory.
  void keep_on_failure() noexcept { keep_ = true; }
  /// Publishes the directory. `at_last` is called directly before the rename. Throws like the constructor; OUT is then
  /// unchanged. Exception: if syncing the parent directory fails, the new OUT is in place, but a power cut may undo it.
  void commit(const std::function<void()>& at_last = {});

 private:
  void look_at_others(const std::function<bool(const std::string& partial)>& is_useful);
  std::string path_;
  std::string partial_;
  OutputChoice choice_;
  bool keep_ = false;
};

/// Deletes a file or a directory tree. Logs failures.
void remove_quietly(const std::string& path) noexcept;

/// Deletes the unfinished directories of `path` that nobody can complete, as the constructor does. Throws Error(io).
void remove_dead_outputs(const std::string& path, const OutputChoice& choice);

/// Makes only the checks of the constructor, for programs that must fail before long work. Throws
/// Error(invalid_argument) if `path` exists and force is off. With force, it throws if `path` has no weights, or has
/// other files that no command of Muster wrote or that have changed since. The message names these files. Throws
/// Error(not_found) if the parent directory is missing.
void check_output(const std::string& path, const OutputChoice& choice);

/// Throws Error(invalid_argument) if `out` is or contains the source directory, because --force would replace the
/// source.
void check_not_source(const std::string& source, const std::string& out);

// The journal of an unfinished export, with which a later export can resume: the finished files, and the parts that
// every process wrote.
//
//  1. Rank 0 first writes muster-export.json, the fingerprint of the whole job.
//  2. A process that has completed a file adds a line to muster-export.RANK.jsonl: the parts that it wrote, with their
//     hashes. The line is durable before the process reports completion.
//  3. Rank 0 adds a line that the file is finished once it has its final name.
//  4. The journal is removed before the directory gets its final name.
// A kill can truncate only the last line, which is then ignored.

struct WrittenPart {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t hash = 0;  ///< XXH3-64
  friend bool operator==(const WrittenPart&, const WrittenPart&) = default;
};

/// By file name.
using FinishedFiles = std::map<std::string, std::vector<WrittenPart>>;

/// Whether a name in an output directory belongs to the journal.
bool is_journal_name(std::string_view name) noexcept;

/// Runs step 1. Throws Error(out_of_space | io).
void begin_journal(const std::string& directory, const std::string& fingerprint);
/// Starts the journal of a later export: the lines of rank 0 are replaced with the finished files, in one step, and the
/// lines of other ranks are deleted. If the process is killed in between, some parts are recorded twice, and duplicates
/// are ignored. Throws Error(out_of_space | io).
void rewrite_journal(const std::string& directory, const FinishedFiles& finished);
/// Runs step 4. Throws Error(io).
void remove_journal(const std::string& directory);

/// The lines of one process. Thread-safe.
class Journal {
 public:
  /// Appends to an existing file, after removing a truncated line.
  Journal(const std::string& directory, int rank);
  /// Steps 2 and 3: the lines are durable on return. Throw Error(out_of_space | io).
  void add_parts(const std::string& file, const std::vector<WrittenPart>& parts);
  void add_finished(const std::string& file);

 private:
  void add(const std::string& text);
  ForkMutex mutex_;
  std::uint64_t length_ = 0;
  os::WritableFile file_;
};

/// Returns the finished files of a leftover directory, and their parts; nullopt if it has no journal, or one of another
/// job.
std::optional<FinishedFiles> read_journal(const std::string& directory, const std::string& fingerprint);

/// Returns the defect of a file that the journal lists as finished; empty if it is correct. The file must have the
/// expected length and header. The parts after the header must cover everything except zeros, and match their hashes.
std::string verify_file(const std::string& path, const std::string& header, std::uint64_t bytes,
                        std::vector<WrittenPart> parts);

}  // namespace muster
