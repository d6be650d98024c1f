// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an unfinished export leaves in its directory, so that a later one can go on: which files are finished, and what
// every process wrote into them.
//
//  1. The first process writes muster-export.json, the fingerprint of the whole job, before anything else.
//  2. A process that has done with a file adds a line to muster-export.RANK.jsonl: the parts that it wrote, with their
//     hashes; on the disk before it says that it has done.
//  3. The first process adds a line that the file is finished when it has its name.
//  4. Before the directory gets its own name, all of this is removed.
// A line that was torn by a kill is the last one, and does not count.

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "src/os/file.hpp"

namespace muster {

struct WrittenPart {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t hash = 0;  ///< XXH3-64
  friend bool operator==(const WrittenPart&, const WrittenPart&) = default;
};

/// Whether a name in an output directory is the journal's.
bool is_journal_name(std::string_view name) noexcept;

/// Step 1. Throws Error(no_space | io).
void begin_journal(const std::string& directory, const std::string& fingerprint);
/// A later export begins: the first process's lines become what is finished, in one step, and those of others go.
/// Whoever is killed in between leaves some parts twice, which are read once. Throws Error(no_space | io).
void rewrite_journal(const std::string& directory, const std::map<std::string, std::vector<WrittenPart>>& finished);
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
  std::mutex mutex_;
  std::uint64_t length_ = 0;
  os::WritableFile file_;
};

/// What is known of a directory that somebody left: empty where there is no journal, or one of another job.
struct JournalContents {
  std::map<std::string, std::vector<WrittenPart>> finished;  ///< by file name
};
std::optional<JournalContents> read_journal(const std::string& directory, const std::string& fingerprint);

/// What is wrong with a file that the journal calls finished; empty where nothing is: it is as long as it should be,
/// has the header that it should have, and after it parts that cover all but zeros and hash to what was written.
std::string verify_file(const std::string& path, const std::string& header, std::uint64_t bytes,
                        std::vector<WrittenPart> parts);

}  // namespace muster
