// SPDX-License-Identifier: Apache-2.0
#pragma once
// A directory of a test's own, gone with everything in it at the end.

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

/// Memory is for tests that sync many small files and do not have the disk for their subject. Where /dev/shm has little
/// room it is the disk, too.
enum class Medium { disk, memory };

class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(Medium medium = Medium::disk) {
    std::filesystem::path parent = std::filesystem::temp_directory_path();
    std::error_code error;
    constexpr std::uintmax_t enough = std::uintmax_t{1} << 30;
    const std::filesystem::space_info shared = std::filesystem::space("/dev/shm", error);
    if (medium == Medium::memory && !error && shared.available >= enough) parent = "/dev/shm";
    // Not a name that a segment of shared memory could have.
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
  /// Files and folders below it.
  [[nodiscard]] std::size_t count() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::recursive_directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

/// Of what is in a directory, in their order.
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
