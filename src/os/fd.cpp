// SPDX-License-Identifier: Apache-2.0
#include "src/os/fd.hpp"

#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "src/base/escaped.hpp"
#include "src/base/message.hpp"

namespace muster::os {
namespace {

ErrorKind kind_of(int err) {
  switch (err) {
    case ENOENT:
    case ENOTDIR:
      return ErrorKind::not_found;
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
    case EFBIG:
      return ErrorKind::out_of_space;
    case ENOSYS:
    case EOPNOTSUPP:
      return ErrorKind::unsupported;
    default:
      return ErrorKind::io;
  }
}

/// Returns the cause as all messages word it.
const char* errno_text(int err) {
  if (err == ENOENT) return "does not exist";
  return err == EEXIST ? "already exists" : ::strerror(err);
}

}  // namespace

Fd::Fd(int fd) noexcept : fd_(fd) {
  if (fd < 0 || fd > STDERR_FILENO) return;
  fd_ = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  // A descriptor that can be neither read nor written occupies the number. Otherwise a file that another thread opens
  // could get it, and would have it for a moment.
  const int nothing = ::open("/dev/null", O_PATH | O_CLOEXEC);
  if (nothing < 0 || ::dup3(nothing, fd, O_CLOEXEC) < 0) ::close(fd);
  if (nothing > STDERR_FILENO) ::close(nothing);
  errno = error;
}

void Fd::reset() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

int write_all(int descriptor, std::string_view bytes) noexcept {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {
      pollfd room{descriptor, POLLOUT, 0};
      ::poll(&room, 1, 1000);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

Error errno_error(ErrorKind kind, const std::string& what, int err, const std::string& path) {
  const char* name = ::strerrorname_np(err);
  std::string text = path.empty() ? what : in_quotes(path) + ": " + what;
  text += std::string(": ") + errno_text(err) + " (" + (name != nullptr ? name : std::to_string(err)) + ")";
  rlimit files{};
  if (err == EMFILE && ::getrlimit(RLIMIT_NOFILE, &files) == 0)
    text += ". Raise the limit of open files (ulimit -n), which is " + std::to_string(files.rlim_cur);
  if (err == ENFILE) text += ". Raise the limit of open files of this host (sysctl fs.file-max)";
  rlimit file_size{};
  if (err == EFBIG && ::getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur != RLIM_INFINITY)
    text += "; RLIMIT_FSIZE allows " + byte_text(file_size.rlim_cur) + " per file. Raise it (ulimit -f)";
  return Error(kind, text, {.path = path, .os_error = err});
}

Error errno_error(const std::string& what, int err, const std::string& path) {
  return errno_error(kind_of(err), what, err, path);
}

}  // namespace muster::os
