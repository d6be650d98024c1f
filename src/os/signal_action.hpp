// SPDX-License-Identifier: Apache-2.0
#pragma once
// What this process does on a signal, kept while a library that was called changes it; and calls that must not raise
// one.

#include <signal.h>

namespace muster::os {

class SignalAction {
 public:
  /// What is done now.
  explicit SignalAction(int signal) noexcept;
  /// Where that is to end the process, `handler` is called instead.
  void handle_where_default(void (*handler)(int)) const noexcept;
  /// From now on the same again.
  void restore() const noexcept;
  /// Likewise, but where that was to end the process, the signal is ignored.
  void restore_or_ignore() const noexcept;

 private:
  [[nodiscard]] bool is_default() const noexcept;

  int signal_;
  struct sigaction action_ {};
};

/// While it lives, a file that this thread's calls would make larger than RLIMIT_FSIZE is their error (EFBIG, which
/// errno_error names with the limit), not SIGXFSZ, which ends the process. The program's own handling of signals stays
/// as it is. errno is kept.
class FileSizeAsError {
 public:
  FileSizeAsError() noexcept;
  FileSizeAsError(const FileSizeAsError&) = delete;
  FileSizeAsError& operator=(const FileSizeAsError&) = delete;
  ~FileSizeAsError();

 private:
  bool is_limited_;
  sigset_t before_{};  // of this thread
};

}  // namespace muster::os
