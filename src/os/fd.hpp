// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file descriptor with one owner, and the way from errno to an Error.

#include <cerrno>
#include <string>
#include <string_view>
#include <utility>

#include "muster/error.hpp"

namespace muster::os {

/// Closes its descriptor, which is never 0, 1 or 2: if a program has closed those, what it prints must not go into a
/// file or a socket of ours. Close errors are lost here: whoever must know them closes explicitly (see file.hpp).
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

/// Writes all of it to a pipe, a socket, a terminal or a file, however little of it each call takes. Waits where a
/// descriptor that does not block has no room. Returns 0, or errno.
int write_all(int descriptor, std::string_view bytes) noexcept;

/// "what: No space left on device (ENOSPC)" with the category that errno suggests.
Error errno_error(const std::string& what, int err = errno, const std::string& path = {});
/// Likewise with a category of the caller's.
Error errno_error(ErrorKind kind, const std::string& what, int err = errno, const std::string& path = {});

}  // namespace muster::os
