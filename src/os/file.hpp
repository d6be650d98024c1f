// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files: mapped, read and written at offsets; small files are read whole. Tests inject failures into every call here
// (fault.hpp). publish.hpp describes how a file gets its name.

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

/// A read-only mapping of a regular file in its current state; no descriptor stays open. If another process shortens
/// the file, reading the lost pages ends this process.
class MappedFile {
 public:
  /// Throws Error(not_found | io), and Error(invalid_argument) if `path` is not a regular file.
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

/// A regular file that is open for reading at offsets during the lifetime of this object.
class ReadableFile {
 public:
  /// Throws as MappedFile::open.
  static ReadableFile open(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Returns the length at the time of opening.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  /// For passing it to another process.
  [[nodiscard]] const Fd& descriptor() const noexcept { return fd_; }
  /// Fills `target`. May be called from several threads at once. Throws Error(io), and Error(corrupt) with os_error()
  /// ENODATA if the file ends too early.
  void read_at(std::uint64_t offset, std::span<std::byte> target) const;
  /// Returns whether access to a mapping of the file may end the process, because another host or process may shorten
  /// or lose the file. True for network file systems and for file systems of another process.
  [[nodiscard]] bool is_remote() const noexcept;
  /// Maps the whole file, with its length at the time of opening. Throws Error(io).
  [[nodiscard]] std::shared_ptr<const MappedFile> map() const;

 private:
  ReadableFile(std::string path, Fd fd, std::uint64_t bytes)
      : path_(std::move(path)), fd_(std::move(fd)), bytes_(bytes) {}
  std::string path_;
  Fd fd_;
  std::uint64_t bytes_;
};

/// Reads a whole small file. Throws Error(not_found | io), and Error(corrupt) if it is longer than `most` or not a
/// regular file.
std::vector<std::byte> read_small_file(const std::string& path, std::uint64_t most);

/// Loads a part of a mapping into memory in one call, which is faster than page by page. Throws Error(io) if the data
/// no longer exists. Has no effect on kernels before 5.14.
void populate_mapped(std::span<const std::byte> part, const std::string& path);
/// Drops the pages of this part of a file mapping from this process. For parts that will not be read again soon.
void forget_mapped(std::span<const std::byte> part) noexcept;

/// Identifies a file on this machine.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t number = 0;
  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

/// While this object lives, a call of this thread that would exceed RLIMIT_FSIZE fails with EFBIG instead of ending the
/// process with SIGXFSZ. errno_error includes the limit in its message. The program's own signal handling is unchanged.
/// The destructor preserves errno.
class FileSizeAsError {
 public:
  FileSizeAsError() noexcept;
  FileSizeAsError& operator=(FileSizeAsError&&) = delete;
  ~FileSizeAsError();

 private:
  bool is_limited_;
  sigset_t before_{};  // the signal mask of this thread
};

/// A file open for writing at offsets, also by several processes at once. Movable. The destructor closes it and ignores
/// errors.
class WritableFile {
 public:
  /// Creates `place`, which must not exist. Messages and injected faults use `name` as the file's name.
  static WritableFile create(const std::string& place, std::string name);
  /// Opens a file that another process created.
  static WritableFile open(const std::string& place, std::string name);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// Allocates the space now if the file system supports it, so that a full disk is detected before the work. Sets the
  /// length.
  void reserve(std::uint64_t bytes);
  /// Writes all of `bytes`. May be called from several threads at once.
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  /// Copies bytes of another file to the offset `to`, inside the kernel if it can. May be called from several threads
  /// at once. Throws as write_at() and ReadableFile::read_at().
  void copy_from(const ReadableFile& source, std::uint64_t from, std::uint64_t to, std::uint64_t bytes);
  /// Starts writing that range to the disk. A hint.
  void start_writeback(std::uint64_t offset, std::uint64_t bytes) noexcept;
  /// Returns when all data that this process wrote is on the disk.
  void sync();
  /// The same, without metadata such as times.
  void sync_data();
  /// Returns the identity of the file, independent of its name. Throws Error(io).
  [[nodiscard]] FileIdentity identity() const;
  /// Throws the errors of close(), with which network file systems report failed writes.
  void close();

 private:
  WritableFile(std::string name, Fd fd) : name_(std::move(name)), fd_(std::move(fd)) {}
  std::string name_;
  Fd fd_;
};

/// A new file that is written through mappings. They stay until the process ends, so that written data survives the
/// death of the process. The owner must serialise the calls.
class GrowingFile {
 public:
  /// Creates the file, whose name must not exist. Throws Error(io | out_of_space | not_found).
  explicit GrowingFile(std::string path);
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Allocates the next `bytes` bytes (whole pages) and maps them. Throws Error(out_of_space | io).
  std::byte* grow(std::uint64_t bytes);

 private:
  std::string path_;
  Fd fd_;
  std::uint64_t bytes_ = 0;
};

}  // namespace muster::os
