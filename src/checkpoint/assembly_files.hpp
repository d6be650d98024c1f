// SPDX-License-Identifier: Apache-2.0
#pragma once
// The files of an assembly as one process sees them: opened at its first write, synced and closed after its last.

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "src/checkpoint/assembly.hpp"
#include "src/os/file.hpp"

namespace muster {

/// Makes a file of the plan in `directory`, at its full size and under a name that no reader takes for it.
FileTarget grow_file(const std::string& directory, const FilePlan& file);
/// All but the header is on the disk: the header, last because until then the file begins with zeros, which no reader
/// takes for one; then the name.
void finish_file(const FilePlan& file, const FileTarget& target);

/// Thread-safe.
class AssemblyFiles {
 public:
  /// `on_stage` gets the number of files, from the first on, that this process has done with, when it grows.
  AssemblyFiles(std::span<const FileTarget> targets, const ProcessWork& work, int process,
                const WrittenCallback& on_written, std::function<void(std::uint32_t)> on_stage);
  /// An item's bytes. Throws Error(no_space | io).
  void write(const Step& step, std::span<const std::byte> bytes);
  /// After write() of a step. Throws Error(no_space | io) where the file's last bytes do not reach the disk.
  void done_with(const Step& step);

 private:
  struct File {
    std::uint64_t steps_left = 0;
    std::shared_ptr<os::WritableFile> file;
    std::vector<WrittenPart> parts;
  };
  std::shared_ptr<os::WritableFile> file(std::uint32_t number);
  void raise_stage();

  std::span<const FileTarget> targets_;
  WrittenCallback on_written_;
  std::function<void(std::uint32_t)> on_stage_;
  std::mutex mutex_;
  std::vector<File> files_;
  std::uint32_t stage_ = 0;
};

}  // namespace muster
