// SPDX-License-Identifier: Apache-2.0
#include "src/os/lock_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "src/base/escaped.hpp"
#include "src/os/directory.hpp"
#include "src/os/fault.hpp"

namespace muster::os {

LockFile::LockFile(std::string path) : path_(std::move(path)) {
  open();
}

LockFile::~LockFile() {
  if (is_taken_) ::flock(fd_.get(), LOCK_UN);
}

void LockFile::open() {
  fd_ = Fd(try_call("open-lock", path_, [&] { return ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666); }));
  // The file of another user may be readable only. That suffices, except on NFS.
  if (!fd_ && (errno == EACCES || errno == EPERM || errno == EROFS))
    fd_ = Fd(try_call("open-lock", path_, [&] { return ::open(path_.c_str(), O_RDONLY | O_CLOEXEC); }));
  if (!fd_) throw errno_error("opening the lock file", errno, path_);
}

bool LockFile::try_take() {
  for (;;) {
    if (try_call("flock", path_, [&] { return ::flock(fd_.get(), LOCK_EX | LOCK_NB); }) != 0) {
      if (errno == EWOULDBLOCK) return false;
      if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP || errno == ENOLCK || errno == EBADF)
        throw errno_error(ErrorKind::unsupported,
                          "locking: its file system has no locks. Use a directory on a local disk or in memory", errno,
                          path_);
      throw errno_error("locking", errno, path_);
    }
    struct stat own {};
    if (::fstat(fd_.get(), &own) != 0) throw errno_error("reading the status", errno, path_);
    const std::optional<FileStatus> named = file_status(path_, Links::followed);
    if (named && named->identity == FileIdentity{own.st_dev, own.st_ino}) break;
    // Another program has deleted or replaced the file since it was opened: its lock no longer excludes anybody.
    open();
  }
  is_taken_ = true;
  return true;
}

}  // namespace muster::os
