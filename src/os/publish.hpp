// SPDX-License-Identifier: Apache-2.0
#pragma once
// How files and directories get their names: whole, or not at all.
//
//  1. It grows under another name in the same directory: elsewhere may be another file system, from which nothing can
//     be renamed.
//  2. A file is written, fsynced if asked for, and closed; what close() reports counts.
//  3. It takes its name in one step: in place of a file that has the name, only if nobody has it, or by changing places
//     with the one that has it. If the answer of a server is lost, the request is repeated and finds the step done:
//     nothing to rename, or the name taken. Then the name is looked at, and if it is this file's all is well.
//  4. If asked for, the directory is fsynced: from then on a power cut takes neither the bytes nor the name.
//  5. What fails before step 4 leaves nothing.
//
// A process that is killed leaves what it was making. The name tells who that was, so that the next one can prove it to
// be nobody's:
//
//   PATH.partial-NONCE@WRITER     it grows, and will be PATH; or it was PATH, and is being removed
//   PATH.replaced-NONCE@WRITER    it was PATH until PATH.partial-NONCE@WRITER takes the name
//
// NONCE is 16 hexadecimal digits, WRITER the process (process.hpp). A WRITER with the pid 0 has let go of it. The name
// says all of this from the first moment to the last: a record inside could be torn, or be gone before the rest. Of a
// name that would become too long, the end is replaced by a hash. These names are made and taken apart here and nowhere
// else.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/os/file.hpp"
#include "src/os/process.hpp"

namespace muster::os {

/// Whether what was finished is also on the disk when a call returns.
enum class Durability : std::uint8_t { synced, unsynced };

/// A file that is written at offsets and takes its name when it is whole. Without commit() the destructor removes it;
/// in a forked child it leaves it to its owner.
class OutputFile {
 public:
  /// `temporary`: what it is called while it grows, a name without a directory; empty: PATH.partial-NONCE@WRITER.
  /// Throws Error(argument) if PATH is a directory, a link, a device or a pipe, which no file shall replace, or if
  /// `temporary` is in another directory; Error(io | no_space | not_found).
  explicit OutputFile(const std::string& path, const std::string& temporary = {});
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&& other) noexcept;
  ~OutputFile();

  [[nodiscard]] const std::string& path() const noexcept { return file_.name(); }
  /// Where it grows; empty when it does not any more.
  [[nodiscard]] const std::string& temporary() const noexcept { return partial_; }
  void reserve(std::uint64_t bytes) { file_.reserve(bytes); }
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes) { file_.write_at(offset, bytes); }
  void start_writeback(std::uint64_t offset, std::uint64_t bytes) noexcept { file_.start_writeback(offset, bytes); }
  void sync_data() { file_.sync_data(); }
  /// If renaming or anything before it fails, what had the name before has it still.
  void commit(Durability durability = Durability::synced);

 private:
  struct Unchecked {};
  OutputFile(Unchecked, const std::string& path, std::string partial);
  friend void publish(const std::string& path, std::span<const std::byte> bytes, const std::string& temporary,
                      Durability durability);
  friend bool publish_first(const std::string& path, std::span<const std::byte> bytes, const std::string& temporary,
                            Durability durability);

  FileIdentity finish(Durability durability);
  void discard() noexcept;
  std::string partial_;  ///< empty when there is nothing to remove
  std::int64_t owner_pid_;
  WritableFile file_;
};

/// A whole file at once, under a name that is Muster's own: PATH is not looked at before. `temporary` as for
/// OutputFile. Throws Error(no_space | io | not_found).
void publish(const std::string& path, std::span<const std::byte> bytes, const std::string& temporary,
             Durability durability = Durability::unsynced);

/// Likewise, but never in place of a file that is there: false then. Exactly one of several that try at the same time
/// gets true.
bool publish_first(const std::string& path, std::span<const std::byte> bytes, const std::string& temporary,
                   Durability durability = Durability::unsynced);

/// At its own name at once, for what is whole when it is there: an empty file. The name must not be there; nothing
/// stays where it fails. Throws Error(no_space | io | not_found).
void write_new_file(const std::string& path, std::span<const std::byte> bytes,
                    Durability durability = Durability::unsynced);

/// Renames a file or a directory; Error(argument) if `to` exists.
void rename_to_new(const std::string& from, const std::string& to);

/// Gives a finished directory, PATH.partial-..., the name PATH that another directory has: they change places, or where
/// the file system cannot do that, the other one becomes PATH.replaced-... first, so that one of the two always exists.
/// Returns where the other one is now.
std::string replace_directory(const std::string& partial, const std::string& path);

/// A name beside `path` for what is to become it, other for every call.
std::string partial_name(const std::string& path);
/// Whether a file name is what a writer that was killed left behind; as 0.1.0 called them (no WRITER), too.
bool is_partial_name(std::string_view name) noexcept;
/// The name of what this process leaves for another to go on with.
std::string released_name(const std::string& partial);

struct Unfinished {
  std::string path;
  std::string tail;  ///< "NONCE@WRITER"
  bool is_replaced = false;
  ProcessIdentity writer;
};
/// All that are beside `path` and were to become it, whoever made them. Throws Error(not_found | io).
std::vector<Unfinished> unfinished_of(const std::string& path);

/// Removes the files that were to become `path` and whose writers are proved dead, as far as that can be done.
void remove_dead_partials(const std::string& path) noexcept;

}  // namespace muster::os
