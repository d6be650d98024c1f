// SPDX-License-Identifier: Apache-2.0
#pragma once
// Publishing files and directories: a name appears with its complete contents or not at all.
//
//  1. The file grows under another name in the same directory, because another directory may be on another file system,
//     from which rename does not work.
//  2. The file is written, fsynced if requested, and closed; errors of close() count.
//  3. The file takes its name in one step. It replaces the file with that name, or takes the name only if it is free,
//     or exchanges names with the existing entry. If the reply of a file server is lost, the client repeats the request
//     and finds the step done: there is nothing to rename, or the name is taken. In that case the name is checked; if
//     it belongs to this file, the step has succeeded.
//  4. If requested, the directory is fsynced. From then on a power failure loses neither the bytes nor the name.
//  5. A failure before step 4 leaves no files.
//
// A process that is killed leaves its unfinished file. The name identifies the writer, so that another process can
// prove that the writer is dead:
//
//   PATH.partial-NONCE@WRITER     grows and will become PATH; or was PATH and is being deleted
//   PATH.replaced-NONCE@WRITER    was PATH, until PATH.partial-NONCE@WRITER takes the name
//
// NONCE is 16 hexadecimal digits, and WRITER is the process (process.hpp). A WRITER with the pid 0 has released the
// file. The name has all this information from the beginning to the end, because a record inside the file could be torn
// or lost. If a name would become too long, a hash replaces its end. No other code creates or parses these names.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>
#include "src/os/file.hpp"
#include "src/os/process.hpp"

namespace muster::os {

/// Whether completed data is on the disk when a call returns.
enum class Durability : std::uint8_t { synced, unsynced };

/// A file that is written at offsets and takes its name when it is complete. Without commit() the destructor deletes
/// it. In a forked child the destructor does nothing.
class PublishedFile {
 public:
  /// `temporary`: the name of the file while it grows, without a directory; empty: PATH.partial-NONCE@WRITER. Throws
  /// Error(invalid_argument) if PATH is a directory, a link, a device or a pipe, because a file must not replace these,
  /// or if `temporary` is in another directory. Throws Error(io | out_of_space | not_found).
  explicit PublishedFile(const std::string& path, const std::string& temporary = {});
  PublishedFile(PublishedFile&& other) noexcept;
  PublishedFile& operator=(PublishedFile&& other) noexcept;
  ~PublishedFile();

  [[nodiscard]] const std::string& path() const noexcept { return file_.name(); }
  /// Returns the path under which it grows; empty after it has taken its name.
  [[nodiscard]] const std::string& temporary() const noexcept { return partial_; }
  void reserve(std::uint64_t bytes) { file_.reserve(bytes); }
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes) { file_.write_at(offset, bytes); }
  void start_writeback(std::uint64_t offset, std::uint64_t bytes) noexcept { file_.start_writeback(offset, bytes); }
  void sync_data() { file_.sync_data(); }
  /// Publishes the file. If the rename or an earlier step fails, the previous file at this path is unchanged.
  void commit(Durability durability = Durability::synced);

 private:
  struct Unchecked {};
  PublishedFile(Unchecked, const std::string& path, std::string partial);
  friend void publish(const std::string& path, std::span<const std::byte> bytes, const std::string& temporary,
                      Durability durability);
  friend bool publish_first(const std::string& path, std::span<const std::byte> bytes, const std::string& temporary,
                            Durability durability);

  FileIdentity finish(Durability durability);
  void discard() noexcept;
  std::string partial_;  ///< empty: nothing to delete
  std::int64_t owner_pid_;
  WritableFile file_;
};

/// Publishes a whole file in one call, under a name that only Muster uses: PATH is not checked first. `temporary` as
/// for OutputFile. Throws Error(out_of_space | io | not_found).
void publish(const std::string& path, std::span<const std::byte> bytes, const std::string& temporary,
             Durability durability = Durability::unsynced);

/// The same, but never replaces an existing file: it then returns false. If several processes try at the same time,
/// exactly one gets true.
bool publish_first(const std::string& path, std::span<const std::byte> bytes, const std::string& temporary,
                   Durability durability = Durability::unsynced);

/// Creates a file directly at its own name. For files that are complete as soon as they exist, such as empty ones. The
/// name must not exist. A failure leaves no file. Throws Error(out_of_space | io | not_found).
void write_new_file(const std::string& path, std::span<const std::byte> bytes,
                    Durability durability = Durability::unsynced);

/// Renames a file or a directory. Throws Error(invalid_argument) if `to` exists.
void rename_to_new(const std::string& from, const std::string& to);

/// Gives a completed directory, PATH.partial-..., the name PATH, which another directory has. The two exchange their
/// names. If the file system cannot exchange names, the old directory first becomes PATH.replaced-..., so that one of
/// the two always exists. Returns the new path of the old directory.
std::string replace_directory(const std::string& partial, const std::string& path);

/// Returns a temporary name beside `path` for its contents. Every call returns a different name.
std::string partial_name(const std::string& path);
/// Returns whether a file name is that of an unfinished file of a killed writer, including the names of version 0.1.0
/// (without WRITER).
bool is_partial_name(std::string_view name) noexcept;
/// Returns the name of a file that this process leaves for another process to continue.
std::string released_name(const std::string& partial);

struct Unfinished {
  std::string path;
  std::string tail;  ///< "NONCE@WRITER"
  bool is_replaced = false;
  ProcessIdentity writer;
};
/// Returns all unfinished files beside `path`, of any writer. Throws Error(not_found | io).
std::vector<Unfinished> unfinished_of(const std::string& path);

/// Deletes the unfinished files of `path` whose writers are proved dead, as far as possible.
void remove_dead_partials(const std::string& path) noexcept;

// Owner, group and mode of a file or directory. A file that replaces another one gets the rights of the replaced file.

struct Rights {
  std::uint32_t mode = 0;  ///< permission bits
  std::uint32_t owner = 0;
  std::uint32_t group = 0;
};
/// Returns the rights of `path`, without following a link; nullopt if it does not exist. Throws Error(io).
std::optional<Rights> rights_of(const std::string& path);
/// Sets the rights of `path`. Owner and group are changed only if this process may do so. If the group cannot be set,
/// neither the group nor other users get permissions. Throws Error(io | not_found).
void set_rights(const std::string& path, const Rights& rights);

}  // namespace muster::os
