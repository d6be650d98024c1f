// SPDX-License-Identifier: Apache-2.0
#include "src/os/process.hpp"

#include <dirent.h>
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

#include "src/base/message.hpp"
#include "src/os/clock.hpp"
#include "src/os/fd.hpp"
#include "src/os/pages.hpp"

namespace muster::os {
namespace {

/// Reads the beginning of a file of /proc, with a terminating zero. A negative result means failure; errno has the
/// reason.
template <std::size_t N>
long read_proc(const char* path, std::array<char, N>& text) noexcept {
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return -1;
  const std::size_t length = std::fread(text.data(), 1, N - 1, file);
  std::fclose(file);
  text.at(length) = 0;
  return static_cast<long>(length);
}

/// Facts from /proc about a process of this namespace.
struct ProcessFacts {
  ProcessState state = ProcessState::unknown;
  std::int64_t parent = 0;  // 0: unknown
  std::optional<std::uint64_t> start;
};
ProcessFacts facts_of(std::int64_t pid) noexcept {
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%lld/stat", static_cast<long long>(pid));
  std::array<char, 1024> line{};
  ProcessFacts facts;
  if (read_proc(path.data(), line) < 0) {
    if (errno == ENOENT) facts.state = ProcessState::dead;
    return facts;
  }
  // The command name is in parentheses and may contain any character. The state follows the last parenthesis, then the
  // parent. The start time is the 19th field after the state.
  const char* at = std::strrchr(line.data(), ')');
  if (at == nullptr || at[1] == 0) return facts;
  const char letter = at[2];
  if (letter == 'T' || letter == 't')
    facts.state = ProcessState::stopped;
  else if (letter == 'Z' || letter == 'X')
    facts.state = ProcessState::dead;
  else
    facts.state = ProcessState::running;
  long long parent = 0;
  if (std::sscanf(at + 3, " %lld", &parent) == 1) facts.parent = parent;
  for (int field = 0; at != nullptr && field < 20; ++field) at = std::strchr(at + 1, ' ');
  unsigned long long start = 0;
  if (at != nullptr && std::sscanf(at, " %llu", &start) == 1) facts.start = start;
  return facts;
}

std::string boot_of_this_host() {
  std::array<char, 64> text{};
  read_proc("/proc/sys/kernel/random/boot_id", text);
  std::string boot = text.data();
  std::erase_if(boot,
                [](char letter) { return std::string_view("0123456789abcdef").find(letter) == std::string::npos; });
  return boot.size() < unknown_boot.size() ? std::string(unknown_boot) : boot.substr(0, unknown_boot.size());
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

struct ThisHost {
  std::string host = plain_host_name();
  std::string boot = boot_of_this_host();
};
const ThisHost& here() {
  static const ThisHost facts;
  return facts;
}

}  // namespace

std::int64_t process_id() noexcept {
  // The ID is cached in a page that the kernel clears in every forked child, because an exchange needs it several times
  // without a system call.
  static auto* const known = []() -> std::atomic<std::int64_t>* {
    const std::uint64_t bytes = page_size();
    void* const page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return nullptr;
    if (::madvise(page, bytes, MADV_WIPEONFORK) == 0) return new (page) std::atomic<std::int64_t>(0);
    ::munmap(page, bytes);
    return nullptr;
  }();
  if (known == nullptr) return ::getpid();
  std::int64_t pid = known->load(std::memory_order_relaxed);
  if (pid == 0) known->store(pid = ::getpid(), std::memory_order_relaxed);
  return pid;
}
std::uint32_t user_id() noexcept {
  return ::geteuid();
}
std::uint32_t thread_id() noexcept {
  return static_cast<std::uint32_t>(::gettid());
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

ProcessState process_state(std::int64_t pid) noexcept {
  return facts_of(pid).state;
}

bool descends_from(std::int64_t pid, std::int64_t ancestor) noexcept {
  constexpr int deepest = 100;  // a parent may end meanwhile, and its ID be used again
  for (int depth = 0; depth < deepest && pid > 0; ++depth) {
    pid = facts_of(pid).parent;
    if (pid == ancestor) return true;
  }
  return false;
}

ProcessIdentity own_identity() {
  // Cached, because every file name that a process creates needs it.
  thread_local ProcessIdentity own;
  if (own.pid != process_id())
    own = {here().host, here().boot, process_id(), facts_of(process_id()).start.value_or(0), own_pid_namespace()};
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
  // Each value has exactly one valid spelling.
  if (!is_plain || !is_boot || identity.pid < 0 || identity_text(identity) != text) return std::nullopt;
  return identity;
}

Life life_of(const ProcessIdentity& identity) noexcept {
  // A copied virtual machine has the boot ID of its original, so the host name must match too.
  if (identity.boot == unknown_boot || identity.boot != here().boot || identity.host != here().host ||
      identity.pid_namespace == 0 || identity.pid_namespace != own_pid_namespace() || identity.pid <= 0)
    return Life::unknown;
  // If /proc hides processes of other users, only the signal shows whether the process exists.
  if (::kill(static_cast<pid_t>(identity.pid), 0) != 0 && errno == ESRCH) return Life::dead;
  const ProcessFacts facts = facts_of(identity.pid);
  if (!facts.start) return Life::alive;
  const bool is_another = identity.start != 0 && *facts.start != identity.start;
  return is_another || facts.state == ProcessState::dead ? Life::dead : Life::alive;
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

std::string hex_text(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  return text;
}

std::string random_hex(std::size_t bytes) {
  std::vector<std::byte> random(bytes);
  random_bytes(random);
  return hex_text(random);
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

namespace {

std::uint64_t open_files() noexcept {
  std::uint64_t count = 0;
  if (DIR* const all = ::opendir("/proc/self/fd"); all != nullptr) {
    for (const dirent* entry = ::readdir(all); entry != nullptr; entry = ::readdir(all))
      if (entry->d_name[0] != '.') ++count;
    ::closedir(all);
    --count;  // the directory itself
  }
  return count;
}

}  // namespace

void allow_more_open_files(std::uint64_t count) noexcept {
  allow_open_files(open_files() + count);
}

std::uint64_t open_files_left() noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return UINT64_MAX;
  return limit.rlim_max - std::min<rlim_t>(limit.rlim_max, open_files());
}

Error open_files_error(const std::string& what, std::uint64_t needed, std::uint64_t left) {
  return {
      ErrorKind::io,
      fmt::format(
          "{} needs {} more open files in this process. The hard limit of the process allows only {}. Raise the hard "
          "limit of open files (ulimit -n, LimitNOFILE), or start fewer ranks",
          what, needed, left),
      {.os_error = EMFILE}};
}

std::span<const RenamedVariable> renamed_variables() noexcept {
  static constexpr std::array<RenamedVariable, 4> all = {{
      {"MUSTER_ALONE", "MUSTER_STANDALONE"},
      {"MUSTER_CALL", "MUSTER_LAUNCH_SPEC"},
      {"MUSTER_DEVICE_WAY", "MUSTER_DEVICE_TRANSPORT"},
      {"MUSTER_PORT", "MUSTER_MASTER_PORT"},
  }};
  return all;
}

std::optional<std::string> environment(const char* name) {
  static const std::vector<RenamedVariable> set_variables = [] {
    std::vector<RenamedVariable> found;
    for (const RenamedVariable& renamed : renamed_variables())
      if (::getenv(renamed.before) != nullptr) found.push_back(renamed);  // NOLINT(concurrency-mt-unsafe): read only
    return found;
  }();
  for (const RenamedVariable& renamed : set_variables)
    if (renamed.now == name)
      throw Error(
          ErrorKind::invalid_argument,
          fmt::format("the environment variable {} is not supported: set {} instead", renamed.before, renamed.now));
  const char* value = ::getenv(name);  // NOLINT(concurrency-mt-unsafe): read only
  if (value == nullptr || *value == 0) return std::nullopt;
  return value;
}

Fd open_pidfd(pid_t pid) noexcept {
  return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0U)));
}

Fd own_pidfd() {
  Fd self = open_pidfd(::getpid());
  if (!self)
    throw with_remedy(errno_error(ErrorKind::unsupported, "pidfd_open"),
                      "Use Linux 5.3 or newer, and a sandbox that allows this call");
  return self;
}

bool send_signal(const Fd& process, int signal) noexcept {
  return ::syscall(SYS_pidfd_send_signal, process.get(), signal, nullptr, 0U) == 0;
}

bool wait_for_exit(const Fd& process, Clock::time_point end) noexcept {
  for (;;) {
    const auto left = Clock::next_sleep(end);
    pollfd wanted{process.get(), POLLIN, 0};
    const int ready = ::poll(&wanted, 1, static_cast<int>(left.count()));
    if (ready > 0) return true;
    if ((ready < 0 && errno != EINTR) || left == left.zero()) return false;
  }
}

bool has_exited(const Fd& pidfd) noexcept {
  pollfd wanted{pidfd.get(), POLLIN, 0};
  return ::poll(&wanted, 1, 0) > 0;
}

SignalAction::SignalAction(int signal) noexcept : signal_(signal) {
  ::sigaction(signal_, nullptr, &action_);
}

bool SignalAction::is_default() const noexcept {
  return (action_.sa_flags & SA_SIGINFO) == 0 && action_.sa_handler == SIG_DFL;
}

void SignalAction::handle_where_default(void (*handler)(int)) const noexcept {
  if (!is_default()) return;
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal_, &action, nullptr);
}

void SignalAction::restore() const noexcept {
  ::sigaction(signal_, &action_, nullptr);
}

void SignalAction::restore_or_ignore() const noexcept {
  struct sigaction action = action_;
  if (is_default()) action.sa_handler = SIG_IGN;
  ::sigaction(signal_, &action, nullptr);
}

}  // namespace muster::os
