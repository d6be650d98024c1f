// SPDX-License-Identifier: Apache-2.0
#pragma once
// OutputDirectory: a directory of results that is there whole or not at all.
//
// 1. OUT.partial-NONCE is made beside OUT and locked; everything is written into it.
// 2. commit(): all files and directories in it are synced, and it takes the name OUT in one step. An OUT that is to be
// replaced changes
//    places with it and is removed after that, so that one of the two is always there.
// 3. Without a commit the destructor removes OUT.partial-NONCE, unless it was told to leave it. What was left (its lock
//    is free) is taken over by the next one that writes to the same OUT and can use it, else removed.

#include <functional>
#include <string>

#include "src/os/fd.hpp"

namespace muster {

class OutputDirectory {
 public:
  /// Throws Error(argument) where `path` exists and `force` is off, or where it is on and `path` is nothing that these
  /// programs write (a directory with other things than a model's); Error(io | no_space) from the file system.
  /// `is_useful`, where given, looks at each directory that was left behind; the first one that it wants is gone on
  /// with.
  OutputDirectory(const std::string& path, bool force,
                  const std::function<bool(const std::string& partial)>& is_useful = {});
  OutputDirectory(const OutputDirectory&) = delete;
  OutputDirectory& operator=(const OutputDirectory&) = delete;
  ~OutputDirectory();

  /// Where to write until commit().
  [[nodiscard]] const std::string& partial() const noexcept { return partial_; }
  /// The destructor leaves what there is.
  void keep_on_failure() noexcept { keep_ = true; }
  /// Throws like the constructor; then OUT is as it was.
  void commit();

 private:
  std::string path_;
  std::string partial_;
  os::Fd lock_;
  bool force_ = false;
  bool keep_ = false;
};

/// The checks of the constructor alone, for programs that want to fail before long work. Throws like it.
void check_output(const std::string& path, bool force);

/// Throws Error(argument) where `out` is the directory that is read from: --force would replace what is being read.
void check_not_source(const std::string& source, const std::string& out);

}  // namespace muster
