// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files: mapped, read and written at offsets, and small ones read whole. Tests inject failures into every call here
// (fault.hpp). How a file gets its name is in publish.hpp.

#include <signal.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::os {

/// A read-only mapping of a regular file as it is; no descriptor stays open. Pages that are gone because somebody
/// shortened the file end the process that reads them.
class MappedFile {
 public:
  /// Throws Error(not_found | io), and Error(argument) if `path` is no regular file.
  static std::shared_ptr<const MappedFile> open(const std::string& path);
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  friend class ReadableFile;
  MappedFile(std::string path, std::span<const std::byte> bytes) : path_(std::move(path)), bytes_(bytes) {}
  std::string path_;
  std::span<const std::byte> bytes_;
};

/// A regular file open for reading at offsets, for as long as this lives.
class ReadableFile {
 public:
  /// Throws as MappedFile::open.
  static ReadableFile open(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Its length when it was opened.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  /// To be given to another process.
  [[nodiscard]] const Fd& descriptor() const noexcept { return fd_; }
  /// Fills `target`. From several threads at once, too. Throws Error(io), and Error(corrupt) with os_error() ENODATA
  /// where the file ends before.
  void read_at(std::uint64_t offset, std::span<std::byte> target) const;
  /// Whether others may shorten or lose the file so that touching a mapping of it ends the process: file systems of a
  /// network or of another process.
  [[nodiscard]] bool is_remote() const noexcept;
  /// The whole file as it was when it was opened. Throws Error(io).
  [[nodiscard]] std::shared_ptr<const MappedFile> map() const;

 private:
  ReadableFile(std::string path, Fd fd, std::uint64_t bytes)
      : path_(std::move(path)), fd_(std::move(fd)), bytes_(bytes) {}
  std::string path_;
  Fd fd_;
  std::uint64_t bytes_;
};

/// The whole of a small file. Throws Error(not_found | io), and Error(corrupt) if it is longer than `most` or no
/// regular file.
std::vector<std::byte> read_small_file(const std::string& path, std::uint64_t most);

/// Brings a part of a mapping into memory at once, which is faster than page after page. Throws Error(io) if it is
/// not there any more; a kernel that cannot (before 5.14) is none the worse.
void populate_mapped(std::span<const std::byte> part, const std::string& path);
/// This part of a file's mapping has been read and will not be again soon: its pages need not stay in this process.
void forget_mapped(std::span<const std::byte> part) noexcept;

/// Tells a file from every other on this machine.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t number = 0;
  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

/// While it lives, a file that this thread's calls would make larger than RLIMIT_FSIZE is their error (EFBIG, which
/// errno_error names with the limit), not SIGXFSZ, which ends the process. The program's own handling of signals stays
/// as it is. errno is kept.
class FileSizeAsError {
 public:
  FileSizeAsError() noexcept;
  FileSizeAsError& operator=(FileSizeAsError&&) = delete;
  ~FileSizeAsError();

 private:
  bool is_limited_;
  sigset_t before_{};  // of this thread
};

/// A file open for writing at offsets, by several processes at once, too. Moves, and closes without a word.
class WritableFile {
 public:
  /// Creates `place`, which must not be there. `name` is what messages (and injected faults) call the file.
  static WritableFile create(const std::string& place, std::string name);
  /// Opens what another process created.
  static WritableFile open(const std::string& place, std::string name);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// Takes the space now, where the file system can: a full disk is known before the work. Sets the length.
  void reserve(std::uint64_t bytes);
  /// All of `bytes`. From several threads at once, too.
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  /// Lets the disk begin with what was written there. A hint.
  void start_writeback(std::uint64_t offset, std::uint64_t bytes) noexcept;
  /// What this process wrote is on the disk.
  void sync();
  /// Likewise, without what only tells of the file (its times).
  void sync_data();
  /// Which file it is, whatever its name. Throws Error(io).
  [[nodiscard]] FileIdentity identity() const;
  /// Reports what close() reports: where network file systems say that a write failed.
  void close();

 private:
  WritableFile(std::string name, Fd fd) : name_(std::move(name)), fd_(std::move(fd)) {}
  std::string name_;
  Fd fd_;
};

/// A new file that is written through mappings, which stay as long as the process lives: what is there when that dies
/// is not lost. Its owner serialises the calls.
class GrowingFile {
 public:
  /// The name must not be there. Throws Error(io | no_space | not_found).
  explicit GrowingFile(std::string path);
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Takes the space of the next `bytes` (whole pages), and maps them. Throws Error(no_space | io).
  std::byte* grow(std::uint64_t bytes);

 private:
  std::string path_;
  Fd fd_;
  std::uint64_t bytes_ = 0;
};

}  // namespace muster::os
