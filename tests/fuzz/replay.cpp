// SPDX-License-Identifier: Apache-2.0
// Feeds every file of the folders and files named to a fuzz target: corpora as ordinary tests. A target fails by ending
// the process.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int count, char** arguments) {
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < count; ++i) {
    if (std::filesystem::is_directory(arguments[i])) {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(arguments[i]))
        if (entry.is_regular_file()) files.push_back(entry.path());
    } else {
      files.emplace_back(arguments[i]);
    }
  }
  std::ranges::sort(files);
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (file.bad() || !file.is_open()) {
      std::fprintf(stderr, "cannot read %s\n", path.c_str());
      return 2;
    }
    // The last line before an abort says which file it was.
    std::printf("%s\n", path.filename().c_str());
    std::fflush(stdout);
    // A copy of just that size: a sanitizer sees each byte read past it.
    const std::vector<std::uint8_t> input(bytes.begin(), bytes.end());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu inputs\n", files.size());
  return files.empty() ? 1 : 0;  // a corpus that is not there must not pass
}
