// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file that serves as a lock between the processes of a host. The kernel releases the lock if its holder is killed.

#include <string>

#include "src/os/fd.hpp"
#include "src/os/file.hpp"

namespace muster::os {

/// The lock of a file (flock), which other programs may take, too. The file stays when the lock is released: if it were
/// deleted, two processes could hold the locks of two files with the same name.
class LockFile {
 public:
  /// Opens the file, and creates it if it does not exist. Its directory must exist. Throws Error(io | not_found |
  /// out_of_space).
  explicit LockFile(std::string path);
  LockFile& operator=(LockFile&&) = delete;
  /// Releases the lock, also for children that were forked meanwhile.
  ~LockFile();

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Takes the lock. Returns false if another process or another object has it. Throws Error(unsupported) if the file
  /// system has no locks, Error(io).
  bool try_take();

 private:
  void open();

  std::string path_;
  Fd fd_;
  bool is_taken_ = false;
};

}  // namespace muster::os
