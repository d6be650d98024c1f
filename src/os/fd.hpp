// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file descriptor with one owner, and the conversion from errno to Error.

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <string>
#include <string_view>
#include <utility>
#include "muster/error.hpp"

namespace muster::os {

/// Closes its descriptor, which is never 0, 1 or 2. If a program has closed those, its output must not end up in a file
/// or socket of the library. Errors of the implicit close are ignored; code that needs them closes explicitly
/// (file.hpp).
class Fd {
 public:
  Fd() noexcept = default;
  explicit Fd(int fd) noexcept;
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Fd() { reset(); }

  [[nodiscard]] int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  int release() noexcept { return std::exchange(fd_, -1); }
  void reset() noexcept;

 private:
  int fd_ = -1;
};

/// Writes all bytes to a pipe, a socket, a terminal or a file, in as many calls as necessary. Waits if a non-blocking
/// descriptor has no room. Returns 0 or an errno.
int write_all(int descriptor, std::string_view bytes) noexcept;

/// Returns an error such as `"PATH": what: No space left on device (ENOSPC)`, with the kind that matches errno. Without
/// a path, the message begins with `what`.
Error errno_error(const std::string& what, int err = errno, const std::string& path = {});
/// The same, with a kind that the caller chooses.
Error errno_error(ErrorKind kind, const std::string& what, int err = errno, const std::string& path = {});

// Closes many descriptors, in a process that has just been forked. Inline, because the reader of HDF5 files does
// not link the library.

/// Closes the descriptors `first` to `last`. Async-signal-safe. Without close_range(2) (Linux before 5.9, some
/// sandboxes), closes each number up to the soft limit of open files.
inline void close_range(unsigned first, unsigned last = ~0U) noexcept {
#ifdef SYS_close_range
  if (::syscall(SYS_close_range, first, last, 0U) == 0) return;
#endif
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const rlim_t end = std::min<rlim_t>(limit.rlim_cur, rlim_t{last} + 1);
  for (rlim_t fd = first; fd < end; ++fd) ::close(static_cast<int>(fd));
}

// Distinguishes a shortage of this process from a failure of the other process, after a call that concerns both.

/// Returns true if this process or its host has run out of descriptors, memory, buffers or ports.
constexpr bool is_own_shortage(int err) noexcept {
  return err == EMFILE || err == ENFILE || err == ENOBUFS || err == ENOMEM || err == EADDRNOTAVAIL;
}

}  // namespace muster::os
