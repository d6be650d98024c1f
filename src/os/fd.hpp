// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file descriptor with one owner, and the conversion from errno to Error.

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

/// Returns an error such as "what: No space left on device (ENOSPC)", with the kind that matches errno.
Error errno_error(const std::string& what, int err = errno, const std::string& path = {});
/// The same, with a kind that the caller chooses.
Error errno_error(ErrorKind kind, const std::string& what, int err = errno, const std::string& path = {});

}  // namespace muster::os
