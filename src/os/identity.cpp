// SPDX-License-Identifier: Apache-2.0
#include "src/os/identity.hpp"

#include <fmt/core.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <optional>

#include "src/os/process.hpp"

namespace muster::os {
namespace {

const std::string unknown_boot(16, '0');

std::string boot_of_this_host() {
  std::string boot;
  std::FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re");
  if (file == nullptr) return unknown_boot;
  std::array<char, 64> text{};
  const std::size_t length = std::fread(text.data(), 1, text.size(), file);
  std::fclose(file);
  for (std::size_t i = 0; i < length && boot.size() < 16; ++i)
    if (std::strchr("0123456789abcdef", text.at(i)) != nullptr && text.at(i) != 0) boot += text.at(i);
  return boot.size() == 16 ? boot : unknown_boot;
}

/// The start time of a process of this namespace; none where /proc does not show it.
std::optional<std::uint64_t> start_of(std::int64_t pid) noexcept {
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%lld/stat", static_cast<long long>(pid));
  std::FILE* file = std::fopen(path.data(), "re");
  if (file == nullptr) return std::nullopt;
  std::array<char, 1024> line{};
  const std::size_t length = std::fread(line.data(), 1, line.size() - 1, file);
  std::fclose(file);
  line.at(length) = 0;
  // Fields count from behind the command's name, which may hold anything; the start is the 22nd of all, 20th from
  // there.
  const char* at = std::strrchr(line.data(), ')');
  for (int field = 0; at != nullptr && field < 20; ++field) at = std::strchr(at + 1, ' ');
  unsigned long long start = 0;
  if (at == nullptr || std::sscanf(at, " %llu", &start) != 1) return std::nullopt;
  return start;
}

std::uint64_t own_pid_namespace() noexcept {
  struct stat status {};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? std::uint64_t{status.st_ino} : 0;
}

bool is_plain_letter(char letter) noexcept {
  return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') || (letter >= '0' && letter <= '9') ||
         letter == '.' || letter == '-' || letter == '_';
}

std::string plain_host_name() {
  constexpr std::size_t longest = 64;
  std::string name = host_name().substr(0, longest);
  std::ranges::replace_if(
      name, [](char letter) { return !is_plain_letter(letter); }, '_');
  return name;
}

struct Here {
  std::string host = plain_host_name();
  std::string boot = boot_of_this_host();
};
const Here& here() {
  static const Here facts;
  return facts;
}

}  // namespace

ProcessIdentity own_identity() {
  // Asked for each name that a process makes.
  thread_local ProcessIdentity own;
  if (own.pid != process_id())
    own = {here().host, here().boot, process_id(), start_of(process_id()).value_or(0), own_pid_namespace()};
  return own;
}

std::string identity_text(const ProcessIdentity& identity) {
  return fmt::format("{},{},{},{},{}", identity.host, identity.boot, identity.pid, identity.start,
                     identity.pid_namespace);
}

std::optional<ProcessIdentity> parse_identity(std::string_view text) {
  auto take = [rest = text]() mutable {
    const std::string_view field = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(field.size() + 1, rest.size()));
    return field;
  };
  const auto number = [&take](auto& target) {
    const std::string_view field = take();
    std::from_chars(field.data(), field.data() + field.size(), target);
  };
  ProcessIdentity identity;
  identity.host = take();
  identity.boot = take();
  number(identity.pid);
  number(identity.start);
  number(identity.pid_namespace);
  const bool is_plain = !identity.host.empty() && std::ranges::all_of(identity.host, is_plain_letter);
  const bool is_boot =
      identity.boot.size() == 16 && identity.boot.find_first_not_of("0123456789abcdef") == std::string::npos;
  // Every value has one spelling.
  if (!is_plain || !is_boot || identity.pid < 0 || identity_text(identity) != text) return std::nullopt;
  return identity;
}

Life life_of(const ProcessIdentity& identity) noexcept {
  // A copied virtual machine has its original's boot id: the host name has to be the same as well.
  if (identity.boot == unknown_boot || identity.boot != here().boot || identity.host != here().host ||
      identity.pid_namespace == 0 || identity.pid_namespace != own_pid_namespace() || identity.pid <= 0)
    return Life::unknown;
  // Where /proc hides other users' processes, only the signal tells.
  if (::kill(static_cast<pid_t>(identity.pid), 0) != 0 && errno == ESRCH) return Life::dead;
  const std::optional<std::uint64_t> start = start_of(identity.pid);
  if (start && identity.start != 0 && *start != identity.start) return Life::dead;
  return process_state(identity.pid) == ProcessState::dead && start ? Life::dead : Life::alive;
}

}  // namespace muster::os
