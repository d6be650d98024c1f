// SPDX-License-Identifier: Apache-2.0
#pragma once
// OutputDirectory: a directory of results that is there whole or not at all.
//
// 1. OUT.partial-NONCE@WRITER (os/publish.hpp) is made beside OUT; everything is written into it.
// 2. What others left beside OUT goes, if its writer is proved dead: a process of this host that is not there any more,
//    or one that let go of it. Of other hosts nothing can be proved: theirs goes if nothing in it has changed for an
//    age that the user gives. Whoever takes such a directory first gives it a name of its own; then it is removed, or
//    gone on with. An OUT.replaced-... gets the name OUT back if there is no OUT.
// 3. commit(): the files beside the weights are listed (written_files_name), all files and directories are synced, and
//    the directory takes the name OUT in one step. An OUT that is to be replaced gives its modes, owner and group to
//    the new directory, changes places with it and is removed after that. Where the file system cannot exchange names,
//    OUT is renamed to OUT.replaced-NONCE@WRITER first: one of the two always exists, and step 2 of the next one finds
//    it.
// 4. Without a commit the destructor removes OUT.partial-..., or lets go of it if it was told to keep it.

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

/// In a directory that was written: {"muster_files": 1, "files": {NAME: DIGEST, ...}}, all files but those of weights.
/// --force deletes a file beside the weights only if it is listed and unchanged.
inline constexpr std::string_view written_files_name = ".muster.files.json";

struct OutputChoice {
  bool force = false;
  /// What processes of other hosts left, and has not changed for so long, is nobody's.
  std::optional<std::chrono::seconds> abandoned_after = {};
};

class OutputDirectory {
 public:
  /// Throws as check_output; Error(io | no_space) from the file system. `is_useful`, if given, looks at each directory
  /// that was left behind; the first one that it wants is gone on with.
  explicit OutputDirectory(const std::string& path, OutputChoice choice = {},
                           const std::function<bool(const std::string& partial)>& is_useful = {});
  OutputDirectory& operator=(OutputDirectory&&) = delete;
  ~OutputDirectory();

  /// Where to write until commit().
  [[nodiscard]] const std::string& partial() const noexcept { return partial_; }
  /// The destructor leaves what there is.
  void keep_on_failure() noexcept { keep_ = true; }
  /// `at_last` is called when nothing but the name is missing. Throws like the constructor; then OUT is as it was,
  /// unless syncing its parent was what failed: then the new one is there, but a power cut may undo it.
  void commit(const std::function<void()>& at_last = {});

 private:
  void look_at_others(const std::function<bool(const std::string& partial)>& is_useful);
  std::string path_;
  std::string partial_;
  OutputChoice choice_;
  bool keep_ = false;
};

/// The checks of the constructor alone, for programs that want to fail before long work. Throws Error(argument) if
/// `path` exists and force is off, or if it is on and `path` has no weights, or has files beside them that no
/// command of Muster wrote or that were changed since (they are named). Error(not_found) if its parent is not there.
void check_output(const std::string& path, const OutputChoice& choice);

/// Throws Error(argument) if `out` is the directory that is read from, or has it inside: --force would replace what is
/// being read.
void check_not_source(const std::string& source, const std::string& out);

// What an unfinished export leaves in its directory, so that a later one can go on: which files are finished, and what
// every process wrote into them.
//
//  1. The first process writes muster-export.json, the fingerprint of the whole job, before anything else.
//  2. A process that has done with a file adds a line to muster-export.RANK.jsonl: the parts that it wrote, with their
//     hashes; on the disk before it says that it has done.
//  3. The first process adds a line that the file is finished when it has its name.
//  4. Before the directory gets its own name, all of this is removed.
// A line that was torn by a kill is the last one, and does not count.

struct WrittenPart {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t hash = 0;  ///< XXH3-64
  friend bool operator==(const WrittenPart&, const WrittenPart&) = default;
};

/// By file name.
using FinishedFiles = std::map<std::string, std::vector<WrittenPart>>;

/// Whether a name in an output directory is the journal's.
bool is_journal_name(std::string_view name) noexcept;

/// Step 1. Throws Error(no_space | io).
void begin_journal(const std::string& directory, const std::string& fingerprint);
/// A later export begins: the first process's lines become what is finished, in one step, and those of others go.
/// Whoever is killed in between leaves some parts twice, which are read once. Throws Error(no_space | io).
void rewrite_journal(const std::string& directory, const FinishedFiles& finished);
/// Step 4. Throws Error(io).
void remove_journal(const std::string& directory);

/// One process's lines. Thread-safe.
class Journal {
 public:
  /// Goes on after what is there; a torn line goes.
  Journal(const std::string& directory, int rank);
  /// Steps 2 and 3: on the disk when they return. Throw Error(no_space | io).
  void add_parts(const std::string& file, const std::vector<WrittenPart>& parts);
  void add_finished(const std::string& file);

 private:
  void add(const std::string& text);
  ForkMutex mutex_;
  std::uint64_t length_ = 0;
  os::WritableFile file_;
};

/// Which files of a directory that somebody left are finished, and their parts: none if there is no journal, or one of
/// another job.
std::optional<FinishedFiles> read_journal(const std::string& directory, const std::string& fingerprint);

/// What is wrong with a file that the journal calls finished; empty if nothing is: it is as long as it should be,
/// has the header that it should have, and after it parts that cover all but zeros and hash to what was written.
std::string verify_file(const std::string& path, const std::string& header, std::uint64_t bytes,
                        std::vector<WrittenPart> parts);

}  // namespace muster
