// SPDX-License-Identifier: Apache-2.0
#pragma once
// A regular file that is read at offsets, never mapped: one that becomes shorter is an error and no signal.
// Tests inject failures into every call here (fault.hpp): "open", "fstat", "pread".

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "src/os/fd.hpp"

namespace muster::os {

class InputFile {
 public:
  /// Throws Error(not_found | io), and Error(argument) where `path` is no regular file.
  static InputFile open(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const Fd& descriptor() const noexcept { return fd_; }
  /// When it was opened.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  /// All of `target`. Throws Error(io), also where the file ends before. From several threads at once, too.
  void read_at(std::uint64_t offset, std::span<std::byte> target) const;

 private:
  InputFile(std::string path, Fd fd, std::uint64_t bytes) : path_(std::move(path)), fd_(std::move(fd)), bytes_(bytes) {}
  std::string path_;
  Fd fd_;
  std::uint64_t bytes_ = 0;
};

}  // namespace muster::os
