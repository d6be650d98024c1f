// SPDX-License-Identifier: Apache-2.0
#include "src/os/file.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/os/directory.hpp"
#include "src/os/fault.hpp"
#include "src/os/pages.hpp"

namespace muster::os {
namespace {

// The maximum size of one call. Linux's own limit is a little below 2 GiB.
constexpr std::size_t largest_transfer = std::size_t{1} << 30;

/// As try_call, for a call that transfers up to `bytes` bytes: the seam may make it transfer only a part.
template <class Call>
ssize_t try_transfer(std::string_view name, const std::string& path, std::size_t bytes, const Call& call) {
  for (;;) {
    const int injected = fault(name, path);
    if (injected > 0) errno = injected;
    const ssize_t moved = injected > 0 ? -1 : call(injected == short_transfer ? (bytes + 1) / 2 : bytes);
    if (moved >= 0 || errno != EINTR) return moved;
  }
}

AddressRange range_of(std::span<const std::byte> part) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(part.data());
  return {begin, begin + part.size()};
}

/// Opens a file and returns it with its length. `otherwise`: the kind of error if it is not a regular file.
std::pair<Fd, std::uint64_t> open_regular(const std::string& path, ErrorKind otherwise) {
  // O_NONBLOCK: opening a named pipe must not block.
  Fd fd(try_call("open", path, [&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); }));
  if (!fd) throw errno_error("opening", errno, path);
  struct stat status {};
  if (try_call("fstat", path, [&] { return ::fstat(fd.get(), &status); }) != 0)
    throw errno_error("reading the size", errno, path);
  if (!S_ISREG(status.st_mode))
    throw file_error(otherwise, "opening", path, S_ISDIR(status.st_mode) ? "it is a directory" : "not a regular file");
  return {std::move(fd), static_cast<std::uint64_t>(status.st_size)};
}

[[noreturn]] void throw_full(const std::string& path, std::uint64_t needed, int error) {
  std::string doing = "reserving " + byte_text(needed);
  if (const std::optional<SpaceFacts> space = space_facts(directory_of(path)))
    doing += fmt::format(" ({} free)", byte_text(space->free_bytes));
  throw errno_error(doing, error, path);
}

sigset_t only(int signal) noexcept {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, signal);
  return set;
}

}  // namespace

FileSizeAsError::FileSizeAsError() noexcept {
  rlimit limit{};
  is_limited_ = ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  if (!is_limited_) return;
  const sigset_t exceeded = only(SIGXFSZ);
  ::pthread_sigmask(SIG_BLOCK, &exceeded, &before_);
}

FileSizeAsError::~FileSizeAsError() {
  if (!is_limited_) return;
  const int error = errno;
  const sigset_t exceeded = only(SIGXFSZ);
  const timespec at_once{};
  // The kernel sends the signal to the thread that made the call, so it is pending now.
  while (::sigtimedwait(&exceeded, nullptr, &at_once) < 0 && errno == EINTR) {
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = error;
}

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  return ReadableFile::open(path).map();
}

ReadableFile ReadableFile::open(const std::string& path) {
  auto [fd, bytes] = open_regular(path, ErrorKind::invalid_argument);
  return {path, std::move(fd), bytes};
}

void ReadableFile::read_at(std::uint64_t offset, std::span<std::byte> target) const {
  while (!target.empty()) {
    const std::size_t piece = std::min(target.size(), largest_transfer);
    const ssize_t got = try_transfer("pread", path_, piece, [&](std::size_t bytes) {
      return ::pread(fd_.get(), target.data(), bytes, static_cast<off_t>(offset));
    });
    if (got < 0) throw errno_error(fmt::format("reading {} bytes at offset {}", piece, offset), errno, path_);
    if (got == 0)
      throw Error(ErrorKind::corrupt,
                  fmt::format("reading {} bytes at {} of {}: it ends before them; has it been shortened?", piece,
                              offset, path_),
                  {.path = path_, .os_error = ENODATA});
    target = target.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

bool ReadableFile::is_remote() const noexcept {
  try {
    return file_system_of(fd_, path_).is_network;
  } catch (const Error&) {
    return true;
  }
}

std::shared_ptr<const MappedFile> ReadableFile::map() const {
  std::span<const std::byte> bytes;
  if (bytes_ != 0) {
    void* memory = MAP_FAILED;
    if (!is_faulty("mmap", path_)) memory = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd_.get(), 0);
    if (memory == MAP_FAILED) throw errno_error(fmt::format("mapping {} bytes", bytes_), errno, path_);
    bytes = {static_cast<const std::byte*>(memory), bytes_};
  }
  return std::shared_ptr<const MappedFile>(new MappedFile(path_, bytes));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

std::vector<std::byte> read_small_file(const std::string& path, std::uint64_t most) {
  const std::pair<Fd, std::uint64_t> file = open_regular(path, ErrorKind::corrupt);
  // One byte more than the file's size, so that the same read also detects the end of the file.
  const std::uint64_t size = std::min(file.second, most) + 1;
  std::vector<std::byte> bytes(size);
  std::uint64_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = try_call("pread", path, [&] {
      return ::pread(file.first.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    });
    if (got < 0) throw errno_error("reading", errno, path);
    if (got == 0) break;
    done += static_cast<std::uint64_t>(got);
  }
  if (done > most)
    throw Error(ErrorKind::corrupt, fmt::format("{}: reading: the file has more than {} bytes", in_quotes(path), most),
                {.path = path});
  bytes.resize(done);
  return bytes;
}

void populate_mapped(std::span<const std::byte> part, const std::string& path) {
#ifdef MADV_POPULATE_READ
  const AddressRange pages = pages_around(range_of(part), page_size());
  int result = -1;
  do {
    result = ::madvise(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin, MADV_POPULATE_READ);
  } while (result != 0 && errno == EINTR);
  if (result != 0 && (errno == EFAULT || errno == EHWPOISON))
    throw errno_error("reading (the file became shorter, or the disk fails)", EIO, path);
#endif
}

void forget_mapped(std::span<const std::byte> part) noexcept {
  // Only whole pages inside the part: the pages at its ends also belong to neighbouring parts.
  const AddressRange pages = pages_within(range_of(part), page_size());
  if (pages.begin != pages.end) ::madvise(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin, MADV_DONTNEED);
}

WritableFile WritableFile::create(const std::string& place, std::string name) {
  Fd fd(try_call("create", name, [&] { return ::open(place.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); }));
  if (!fd) throw errno_error("creating", errno, name);
  return {std::move(name), std::move(fd)};
}

WritableFile WritableFile::open(const std::string& place, std::string name) {
  Fd fd(try_call("open-for-writing", name, [&] { return ::open(place.c_str(), O_WRONLY | O_CLOEXEC); }));
  if (!fd) throw errno_error("opening for writing", errno, name);
  return {std::move(name), std::move(fd)};
}

void WritableFile::reserve(std::uint64_t bytes) {
  if (bytes == 0) return;
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) throw_full(name_, bytes, EFBIG);
  const auto length = static_cast<off_t>(bytes);
  const FileSizeAsError no_signal;
  if (try_call("fallocate", name_, [&] { return ::fallocate(fd_.get(), 0, 0, length); }) == 0) return;
  if (errno != EOPNOTSUPP && errno != ENOSYS) throw_full(name_, bytes, errno);
  // The file system cannot reserve space. Setting the length keeps concurrent writers from extending the file step by
  // step.
  if (is_faulty("ftruncate", name_) || ::ftruncate(fd_.get(), length) != 0)
    throw errno_error("setting the length", errno, name_);
}

void WritableFile::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  const FileSizeAsError no_signal;
  while (!bytes.empty()) {
    const std::size_t piece = std::min(bytes.size(), largest_transfer);
    const ssize_t written = try_transfer("pwrite", name_, piece, [&](std::size_t length) {
      return ::pwrite(fd_.get(), bytes.data(), length, static_cast<off_t>(offset));
    });
    // A write to a regular file transfers at least one byte or fails.
    if (written <= 0)
      throw errno_error(fmt::format("writing {} bytes at offset {}", piece, offset), written < 0 ? errno : EIO, name_);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

void WritableFile::copy_from(const ReadableFile& source, std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
  const FileSizeAsError no_signal;
  while (bytes != 0) {
    const std::size_t piece = std::min<std::uint64_t>(bytes, largest_transfer);
    auto at_source = static_cast<off_t>(from);
    auto at_target = static_cast<off_t>(to);
    const ssize_t copied = try_transfer("copy_file_range", name_, piece, [&](std::size_t length) {
      return ::copy_file_range(source.descriptor().get(), &at_source, fd_.get(), &at_target, length, 0);
    });
    if (copied <= 0) break;
    from += static_cast<std::uint64_t>(copied);
    to += static_cast<std::uint64_t>(copied);
    bytes -= static_cast<std::uint64_t>(copied);
  }
  if (bytes == 0) return;
  // The kernel cannot copy between these files, or there is a failure that reading or writing reports with its cause.
  constexpr std::uint64_t buffer_bytes = std::uint64_t{1} << 20;
  const auto buffer = std::make_unique_for_overwrite<std::byte[]>(std::min(bytes, buffer_bytes));
  while (bytes != 0) {
    const std::span<std::byte> piece(buffer.get(), std::min(bytes, buffer_bytes));
    source.read_at(from, piece);
    write_at(to, piece);
    from += piece.size();
    to += piece.size();
    bytes -= piece.size();
  }
}

void WritableFile::start_writeback(std::uint64_t offset, std::uint64_t bytes) noexcept {
  ::sync_file_range(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes), SYNC_FILE_RANGE_WRITE);
}

void WritableFile::sync() {
  if (is_faulty("fsync", name_) || ::fsync(fd_.get()) != 0) throw errno_error("syncing the file to disk", errno, name_);
}

void WritableFile::sync_data() {
  if (is_faulty("fdatasync", name_) || ::fdatasync(fd_.get()) != 0)
    throw errno_error("syncing the file to disk", errno, name_);
}

FileIdentity WritableFile::identity() const {
  struct stat status {};
  if (is_faulty("fstat", name_) || ::fstat(fd_.get(), &status) != 0)
    throw errno_error("reading the status", errno, name_);
  return {status.st_dev, status.st_ino};
}

void WritableFile::close() {
  // close() invalidates the descriptor, whatever it returns.
  const bool injected = is_faulty("close", name_);
  const int error = injected ? errno : 0;
  const int result = ::close(fd_.release());
  if (injected) errno = error;
  if ((result != 0 || injected) && errno != EINTR) throw errno_error("closing", errno, name_);
}

GrowingFile::GrowingFile(std::string path)
    : path_(std::move(path)), fd_(try_call("create", path_, [&] {
        return ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      })) {
  if (!fd_) throw errno_error("creating", errno, path_);
}

std::byte* GrowingFile::grow(std::uint64_t bytes) {
  const FileSizeAsError no_signal;
  // If the file system cannot reserve space, the C library writes zeros.
  int status = EINTR;
  while (status == EINTR)
    status = is_faulty("fallocate", path_)
                 ? errno
                 : ::posix_fallocate(fd_.get(), static_cast<off_t>(bytes_), static_cast<off_t>(bytes));
  if (status != 0) throw_full(path_, bytes_ + bytes, status);
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), static_cast<off_t>(bytes_));
  if (memory == MAP_FAILED) throw errno_error(fmt::format("mapping {} bytes", bytes), errno, path_);
#ifdef MADV_POPULATE_WRITE
  // Populating all pages in one call costs a fraction of one page fault each.
  (void)::madvise(memory, bytes, MADV_POPULATE_WRITE);
#endif
  bytes_ += bytes;
  return static_cast<std::byte*>(memory);
}

}  // namespace muster::os
