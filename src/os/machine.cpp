// SPDX-License-Identifier: Apache-2.0
#include "src/os/machine.hpp"

#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <vector>

#include "src/os/process.hpp"

namespace muster::os {
namespace {

/// mountinfo contains blanks and similar characters as \040.
std::string unescaped(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      out += static_cast<char>(std::strtol(text.substr(i + 1, 3).c_str(), nullptr, 8));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

bool is_inside(const std::string& path, const std::string& point) {
  if (!path.starts_with(point)) return false;
  return point.ends_with('/') || path.size() == point.size() || path[point.size()] == '/';
}

std::optional<std::uint64_t> limit_of(decltype(RLIMIT_NOFILE) resource) noexcept {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

}  // namespace

std::string kernel_name() {
  utsname names{};
  if (::uname(&names) != 0) return "unknown";
  return std::string(names.sysname) + " " + names.release + " " + names.machine;
}

std::optional<MountFacts> mount_facts(const std::string& path) {
  std::error_code error;
  const std::string whole = std::filesystem::canonical(path, error).string();
  if (error) return std::nullopt;
  std::optional<MountFacts> best;
  std::ifstream file("/proc/self/mountinfo");
  std::string line;
  while (std::getline(file, line)) {
    // An example line: "36 35 98:0 /root /mnt rw,noatime shared:1 - nfs4 server:/export rw,hard".
    std::istringstream words(line);
    std::vector<std::string> fields;
    for (std::string word; words >> word;) fields.push_back(word);
    std::size_t dash = 6;
    while (dash < fields.size() && fields[dash] != "-") ++dash;
    if (dash + 3 >= fields.size()) continue;
    const std::string point = unescaped(fields[4]);
    // If two mounts have the same mount point, the later one is on top.
    if (!is_inside(whole, point) || (best && point.size() < best->point.size())) continue;
    best = MountFacts{point, fields[dash + 1], unescaped(fields[dash + 2]), fields[5] + "," + fields[dash + 3]};
  }
  return best;
}

int process_namespaces() {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line)) {
    if (!line.starts_with("NSpid:")) continue;
    std::istringstream words(line.substr(6));
    int count = 0;
    for (std::string word; words >> word;) ++count;
    return count;
  }
  return 0;
}

bool has_seccomp() noexcept {
  return ::access("/proc/sys/kernel/seccomp/actions_avail", R_OK) == 0;
}

bool has_pidfd() noexcept {
  return static_cast<bool>(open_pidfd(static_cast<pid_t>(process_id())));
}

ResourceLimits resource_limits() noexcept {
  return {limit_of(RLIMIT_NOFILE), limit_of(RLIMIT_FSIZE), limit_of(RLIMIT_AS)};
}

}  // namespace muster::os
