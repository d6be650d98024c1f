// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target on every file of the given folders and files, so that corpora are ordinary tests. A target fails
// by terminating the process.

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
    // The last line before an abort names the file.
    std::printf("%s\n", path.filename().c_str());
    std::fflush(stdout);
    // A copy of exactly this size, so that a sanitizer detects each byte read past its end.
    const std::vector<std::uint8_t> input(bytes.begin(), bytes.end());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu inputs\n", files.size());
  return files.empty() ? 1 : 0;  // a missing corpus must not pass
}
