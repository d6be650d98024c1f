// SPDX-License-Identifier: Apache-2.0
// The lower bound for an export: one process writes this many bytes with large writes and syncs them. Prints seconds.
//   raw_write FILE BYTES [--reserve]

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s FILE BYTES [--reserve]\n", argv[0]);
    return 2;
  }
  const std::uint64_t bytes = std::strtoull(argv[2], nullptr, 10);
  const bool reserves = argc > 3 && std::strcmp(argv[3], "--reserve") == 0;
  // Data that no file system can compress or store as a hole.
  std::vector<std::uint64_t> block((8 << 20) / sizeof(std::uint64_t));
  std::uint64_t state = 88172645463325252ULL;
  for (std::uint64_t& word : block) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    word = state;
  }
  const auto begin = std::chrono::steady_clock::now();
  const int file = ::open(argv[1], O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) {
    std::perror(argv[1]);
    return 1;
  }
  bool good = !reserves || ::posix_fallocate(file, 0, static_cast<off_t>(bytes)) == 0;
  for (std::uint64_t at = 0; good && at < bytes;) {
    const std::uint64_t piece = std::min<std::uint64_t>(bytes - at, block.size() * sizeof(std::uint64_t));
    const ssize_t written = ::pwrite(file, block.data(), piece, static_cast<off_t>(at));
    good = written > 0;
    at += good ? static_cast<std::uint64_t>(written) : 0;
  }
  good = good && ::fsync(file) == 0 && ::close(file) == 0;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  if (!good) {
    std::perror("writing");
    return 1;
  }
  std::printf("%.6f\n", took.count());
  return 0;
}
