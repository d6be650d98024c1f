// SPDX-License-Identifier: Apache-2.0
#include "src/os/process.hpp"

#include <sched.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::os {

std::int64_t process_id() noexcept {
  return ::getpid();
}
std::uint32_t user_id() noexcept {
  return ::geteuid();
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

ProcessState process_state(std::int64_t pid) noexcept {
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%lld/stat", static_cast<long long>(pid));
  std::FILE* file = std::fopen(path.data(), "re");
  if (file == nullptr) return errno == ENOENT ? ProcessState::dead : ProcessState::unknown;
  std::array<char, 512> line{};
  const std::size_t length = std::fread(line.data(), 1, line.size() - 1, file);
  std::fclose(file);
  line[length] = 0;
  // The command's name stands in parentheses and may hold anything: the state follows the last one.
  const char* end = std::strrchr(line.data(), ')');
  if (end == nullptr || end[1] == 0) return ProcessState::unknown;
  switch (end[2]) {
    case 'T':
    case 't':
      return ProcessState::stopped;
    case 'Z':
    case 'X':
      return ProcessState::dead;
    default:
      return ProcessState::running;
  }
}

void random_bytes(std::span<std::byte> target) {
  while (!target.empty()) {
    const ssize_t got = ::getrandom(target.data(), target.size(), 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw errno_error("getrandom");
    }
    target = target.subspan(static_cast<std::size_t>(got));
  }
}

std::string random_hex(std::size_t bytes) {
  std::vector<std::byte> random(bytes);
  random_bytes(random);
  std::string text;
  text.reserve(2 * bytes);
  for (const std::byte byte : random) {
    constexpr const char* digits = "0123456789abcdef";
    text += digits[std::to_integer<unsigned>(byte) >> 4U];
    text += digits[std::to_integer<unsigned>(byte) & 15U];
  }
  return text;
}

std::uint64_t thread_page_faults() noexcept {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return static_cast<std::uint64_t>(usage.ru_minflt);
}

int usable_cores() noexcept {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

void allow_open_files(std::uint64_t count) noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= count) return;
  limit.rlim_cur = std::min<rlim_t>(count, limit.rlim_max);
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

std::optional<std::string> environment(const char* name) {
  const char* value = ::getenv(name);  // NOLINT(concurrency-mt-unsafe): read only
  if (value == nullptr || *value == 0) return std::nullopt;
  return value;
}

}  // namespace muster::os
