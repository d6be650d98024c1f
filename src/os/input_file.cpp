// SPDX-License-Identifier: Apache-2.0
#include "src/os/input_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "src/os/fault.hpp"

namespace muster::os {
namespace {

// Linux reads a little below 2 GiB in one call.
constexpr std::size_t largest_read = std::size_t{1} << 30;

bool is_faulty(std::string_view call, const std::string& path) noexcept {
  const int error = fault(call, path);
  if (error == 0) return false;
  errno = error;
  return true;
}

}  // namespace

InputFile InputFile::open(const std::string& path) {
  // O_NONBLOCK: a pipe of that name must not hold us up.
  Fd fd;
  if (!is_faulty("open", path)) fd = Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) throw errno_error("opening", errno, path);
  struct stat status {};
  if (is_faulty("fstat", path) || ::fstat(fd.get(), &status) != 0)
    throw errno_error("asking for the size of", errno, path);
  if (!S_ISREG(status.st_mode))
    throw Error(ErrorKind::argument,
                fmt::format("opening {}: it is {}", path, S_ISDIR(status.st_mode) ? "a directory" : "no regular file"),
                {.path = path});
  return {path, std::move(fd), static_cast<std::uint64_t>(status.st_size)};
}

void InputFile::read_at(std::uint64_t offset, std::span<std::byte> target) const {
  while (!target.empty()) {
    const std::size_t piece = std::min(target.size(), largest_read);
    ssize_t got = -1;
    if (!is_faulty("pread", path_)) got = ::pread(fd_.get(), target.data(), piece, static_cast<off_t>(offset));
    if (got < 0) {
      if (errno == EINTR) continue;
      throw errno_error(fmt::format("reading {} bytes at {} of", piece, offset), errno, path_);
    }
    if (got == 0)
      throw Error(
          ErrorKind::io,
          fmt::format("reading {} bytes at {} of {}: the file ends there, it has become shorter", piece, offset, path_),
          {.path = path_});
    target = target.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

}  // namespace muster::os
