// SPDX-License-Identifier: Apache-2.0
#include "src/os/subprocess.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <optional>
#include <string_view>

#include "src/os/clock.hpp"
#include "src/os/fault.hpp"
#include "src/os/process.hpp"

namespace muster::os {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool is_sanitized = true;
#else
constexpr bool is_sanitized = false;
#endif

// Variables that a program of this project may need to start at all. Variables that change the behaviour of libraries
// are not passed on.
constexpr std::array<std::string_view, 5> passed_on = {"LD_LIBRARY_PATH", "ASAN_OPTIONS", "UBSAN_OPTIONS",
                                                       "LSAN_OPTIONS", "TSAN_OPTIONS"};

/// Initializes and destroys the two objects of posix_spawn.
class SpawnSettings {
 public:
  SpawnSettings() {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
  }
  SpawnSettings& operator=(SpawnSettings&&) = delete;
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
  posix_spawn_file_actions_t actions{};
  posix_spawnattr_t attributes{};
};

}  // namespace

/// A child process. The destructor kills and reaps it.
class RunningChild {
 public:
  explicit RunningChild(pid_t pid) : pid_(pid), process_(open_pidfd(pid)) {}
  RunningChild& operator=(RunningChild&&) = delete;
  ~RunningChild() {
    if (pid_ > 0) {
      kill();
      SubprocessResult unused;
      take(unused);
    }
  }
  void kill() noexcept {
    if (process_)
      send_signal(process_, SIGKILL);
    else
      ::kill(pid_, SIGKILL);
  }
  /// Returns the CPU time of the process; nullopt if the kernel does not report it.
  [[nodiscard]] std::optional<std::chrono::nanoseconds> cpu_time() const noexcept {
    clockid_t clock{};
    timespec time{};
    if (::clock_getcpuclockid(pid_, &clock) != 0 || ::clock_gettime(clock, &time) != 0) return std::nullopt;
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  }
  [[nodiscard]] const Fd& process() const noexcept { return process_; }
  void take(SubprocessResult& result) noexcept {
    int status = 0;
    rusage used{};
    pid_t taken = -1;
    do {
      taken = ::wait4(pid_, &status, 0, &used);
    } while (taken < 0 && errno == EINTR);
    pid_ = -1;
    if (taken < 0) return;
    result.end = WIFSIGNALED(status) ? SubprocessEnd::signalled : SubprocessEnd::exited;
    result.status = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
    result.peak_bytes = static_cast<std::uint64_t>(used.ru_maxrss) * 1024;
  }

 private:
  pid_t pid_;
  Fd process_;
};

namespace {

/// Returns a copy with a number above those that the program uses.
Fd moved_up(int fd) {
  constexpr int above = 16;
  Fd copy(::fcntl(fd, F_DUPFD_CLOEXEC, above));
  if (!copy) throw errno_error("subprocess: duplicating a descriptor");
  return copy;
}

pid_t start(const std::vector<std::string>& command, const Fd& input, const Fd& socket) {
  std::vector<std::string> words = command;
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  std::vector<std::string> variables;
  for (const std::string_view name : passed_on) {
    const char* value = ::getenv(std::string(name).c_str());
    if (value != nullptr) variables.push_back(fmt::format("{}={}", name, value));
  }
  std::vector<char*> environment;
  environment.reserve(variables.size() + 1);
  for (std::string& variable : variables) environment.push_back(variable.data());
  environment.push_back(nullptr);

  SpawnSettings settings;
  sigset_t none;
  sigset_t all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&settings.attributes, &none);
  ::posix_spawnattr_setsigdefault(&settings.attributes, &all);
  ::posix_spawnattr_setflags(&settings.attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  int failure = ::posix_spawn_file_actions_adddup2(&settings.actions, input.get(), subprocess_input);
  if (failure == 0) failure = ::posix_spawn_file_actions_adddup2(&settings.actions, socket.get(), subprocess_socket);
  for (int standard = 0; failure == 0 && standard < (is_sanitized ? 2 : 3); ++standard)
    failure = ::posix_spawn_file_actions_addopen(&settings.actions, standard, "/dev/null", O_RDWR, 0);
  pid_t pid = -1;
  if (failure == 0) failure = fault("spawn", command[0]);
  if (failure == 0)
    failure = ::posix_spawn(&pid, command[0].c_str(), &settings.actions, &settings.attributes, arguments.data(),
                            environment.data());
  if (failure == ENOENT || failure == ENOTDIR || failure == EACCES || failure == ENOEXEC)
    throw errno_error(ErrorKind::unsupported, "starting the program", failure, command[0]);
  if (failure != 0) throw errno_error("starting the program", failure, command[0]);
  return pid;
}

}  // namespace

/// The time limit of a program.
class Deadline {
 public:
  Deadline(const SubprocessLimits& limits, const RunningChild& child)
      : cpu_(child.cpu_time().value_or(std::chrono::nanoseconds(0)) + limits.deadline),
        end_(Clock::now() + std::max(limits.deadline, limits.longest)),
        next_(Clock::now() + limits.deadline) {}

  /// Waits until there is something to read or the process has ended. Returns false at the deadline.
  bool wait_for(const Fd& what, const RunningChild& child) {
    for (;;) {
      pollfd wanted{what.get(), POLLIN, 0};
      const int ready = ::poll(&wanted, 1, static_cast<int>(Clock::next_sleep(next_).count()));
      if (ready < 0 && errno != EINTR) throw errno_error("subprocess: waiting for the program");
      // A program that sends without pause has the same time limit.
      if (has_passed(child)) return false;
      if (ready > 0) return true;
    }
  }

 private:
  /// A program cannot use more CPU time than has elapsed, so the next check is at the earliest time at which it could
  /// exceed its limit.
  bool has_passed(const RunningChild& child) {
    const auto now = Clock::now();
    if (now < next_) return false;
    const std::optional<std::chrono::nanoseconds> used = child.cpu_time();
    if (now >= end_ || !used || *used >= cpu_) return true;
    constexpr std::chrono::milliseconds least(5);
    next_ = std::min(end_, now + std::max<std::chrono::nanoseconds>(cpu_ - *used, least));
    return false;
  }

  std::chrono::nanoseconds cpu_;
  Clock::time_point end_;
  Clock::time_point next_;
};

namespace {

struct SocketPair {
  Fd near_end;
  Fd far_end;
};

SocketPair make_sockets(const std::string& program) {
  std::array<int, 2> ends{};
  const int injected = fault("socketpair", program);
  if (injected != 0 || ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0)
    throw errno_error("subprocess: creating a socket to the program", injected != 0 ? injected : errno);
  return {Fd(ends[0]), Fd(ends[1])};
}

RunningChild start_with(const std::vector<std::string>& command, const Fd& input, Fd far_end) {
  const Fd file = moved_up(input.get());
  const Fd socket = moved_up(far_end.get());
  return RunningChild(start(command, file, socket));
}

}  // namespace

struct Subprocess::Running {
  Running(const std::vector<std::string>& command, const Fd& input, SocketPair sockets)
      : socket(std::move(sockets.near_end)), child(start_with(command, input, std::move(sockets.far_end))) {}
  Fd socket;
  Clock::time_point began = Clock::now();
  RunningChild child;
  Deadline deadline{{}, child};
  bool is_late = false;
};

Subprocess::Subprocess(const std::vector<std::string>& command, const Fd& input)
    : running_(std::make_unique<Running>(command, input, make_sockets(command[0]))) {}
Subprocess::~Subprocess() = default;

void Subprocess::begin(const SubprocessLimits& limits) {
  running_->deadline = Deadline(limits, running_->child);
}

void Subprocess::send(std::span<const std::byte> question) noexcept {
  // A failure, or a peer that does not read, is detected when the answer is read.
  (void)::send(running_->socket.get(), question.data(), question.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

std::size_t Subprocess::receive(std::span<std::byte> target) {
  std::size_t done = 0;
  while (done < target.size() && !running_->is_late) {
    if (!running_->deadline.wait_for(running_->socket, running_->child)) {
      running_->is_late = true;
      break;
    }
    const ssize_t got = ::recv(running_->socket.get(), target.data() + done, target.size() - done, 0);
    // A reset means that the peer ended before it had read the question.
    if (got == 0 || (got < 0 && errno == ECONNRESET)) break;
    if (got < 0 && errno != EINTR) throw errno_error("subprocess: reading the output of the program");
    done += static_cast<std::size_t>(std::max<ssize_t>(got, 0));
  }
  return done;
}

void Subprocess::stop() noexcept {
  running_->is_late = true;
}

SubprocessResult Subprocess::finish() {
  RunningChild& child = running_->child;
  const bool is_over = !running_->is_late && (!child.process() || running_->deadline.wait_for(child.process(), child));
  if (!is_over) child.kill();
  SubprocessResult result;
  child.take(result);
  if (!is_over) result.end = SubprocessEnd::timed_out;
  result.wall = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - running_->began);
  return result;
}

SubprocessResult run_subprocess(const std::vector<std::string>& command, const Fd& input,
                                const SubprocessLimits& limits) {
  constexpr std::size_t piece = std::size_t{64} << 10;
  Subprocess program(command, input);
  program.begin(limits);
  std::vector<std::byte> output;
  std::size_t got = piece;
  while (got == piece && output.size() <= limits.output_bytes) {
    output.resize(output.size() + piece);
    got = program.receive(std::span(output).last(piece));
    output.resize(output.size() - piece + got);
  }
  const bool is_too_much = output.size() > limits.output_bytes;
  if (is_too_much) program.stop();
  SubprocessResult result = program.finish();
  if (is_too_much) result.end = SubprocessEnd::too_much;
  result.output = std::move(output);
  return result;
}

}  // namespace muster::os
