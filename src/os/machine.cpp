// SPDX-License-Identifier: Apache-2.0
#include "src/os/machine.hpp"

#include <mntent.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>
#include <vector>

#include "src/os/process.hpp"

namespace muster::os {
namespace {

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
  const std::unique_ptr<FILE, decltype(&::endmntent)> file(::setmntent("/proc/self/mounts", "re"), &::endmntent);
  mntent mount{};
  std::vector<char> line(1 << 16);
  while (file && ::getmntent_r(file.get(), &mount, line.data(), static_cast<int>(line.size())) != nullptr) {
    // If two mounts have the same mount point, the later one is on top.
    const std::string point = mount.mnt_dir;
    if (!is_inside(whole, point) || (best && point.size() < best->point.size())) continue;
    best = MountFacts{point, mount.mnt_type, mount.mnt_fsname, mount.mnt_opts};
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
