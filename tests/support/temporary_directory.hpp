// SPDX-License-Identifier: Apache-2.0
#pragma once
// A temporary directory for one test, which is deleted at the end with its contents.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace muster::test {

/// `memory` is for tests that sync many small files and do not test the disk. If /dev/shm has little space, the disk is
/// used instead.
enum class Medium { disk, memory };

class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(Medium medium = Medium::disk) {
    std::filesystem::path parent = std::filesystem::temp_directory_path();
    std::error_code error;
    constexpr std::uintmax_t enough = std::uintmax_t{1} << 30;
    const std::filesystem::space_info shared = std::filesystem::space("/dev/shm", error);
    if (medium == Medium::memory && !error && shared.available >= enough) parent = "/dev/shm";
    // A name that no shared-memory segment can have.
    std::string name = (parent / "test-folder-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
    path_ = name;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::string operator/(std::string_view name) const { return (path_ / name).string(); }
  /// Returns the number of files and directories below it.
  [[nodiscard]] std::size_t count() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::recursive_directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

/// Returns the sorted names of the entries of a directory.
inline std::vector<std::string> names_in(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

inline void write_text(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace muster::test
