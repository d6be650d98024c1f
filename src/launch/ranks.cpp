// SPDX-License-Identifier: Apache-2.0

#include "src/launch/ranks.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string_view>
#include <system_error>
#include <thread>

#include "src/base/message.hpp"
#include "src/os/clock.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"
#include "src/rendezvous/world.hpp"

namespace muster::launch {
namespace {

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  pointers.reserve(texts.size() + 1);
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

/// Closes the descriptors that exec would close, except those that are to be inherited. The launcher has one thread, so
/// no descriptors are opened meanwhile.
void close_as_exec_does(std::span<const int> inherited) {
  std::vector<int> closed;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir("/proc/self/fd"), ::closedir);
  while (const dirent* item = directory ? ::readdir(directory.get()) : nullptr) {
    const int descriptor = std::atoi(item->d_name);
    const bool is_closed = descriptor > STDERR_FILENO && descriptor != ::dirfd(directory.get()) &&
                           (::fcntl(descriptor, F_GETFD) & FD_CLOEXEC) != 0 &&
                           std::ranges::find(inherited, descriptor) == inherited.end();
    if (is_closed) closed.push_back(descriptor);
  }
  for (const int descriptor : closed) ::close(descriptor);
}

/// Sets up the child. Only functions that are safe after the fork of a process with threads are used. Returns 0 or
/// errno.
int take_over(const Inheritance& inheritance, pid_t launcher) {
  int failure = 0;
  // If the launcher dies before this call, the death signal never arrives. In that case the parent is already a
  // different process.
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) failure = errno;
  if (::getppid() != launcher) ::_exit(1);
  if (inheritance.input >= 0 && ::dup2(inheritance.input, STDIN_FILENO) < 0) failure = errno;
  if (inheritance.output >= 0 && ::dup2(inheritance.output, STDOUT_FILENO) < 0) failure = errno;
  if (inheritance.error >= 0 && ::dup2(inheritance.error, STDERR_FILENO) < 0) failure = errno;
  for (const int descriptor : inheritance.descriptors)
    if (::fcntl(descriptor, F_SETFD, 0) != 0) failure = errno;
  return failure;
}

[[noreturn]] void become(const ExecArguments& arguments, const Inheritance& inheritance, pid_t launcher, int report) {
  int failure = take_over(inheritance, launcher);
  if (failure == 0) {
    ::sigprocmask(SIG_SETMASK, &inheritance.mask, nullptr);
    ::execvpe(arguments.program(), arguments.command(), arguments.environment());
    failure = errno;
  }
  [[maybe_unused]] const ssize_t told = ::write(report, &failure, sizeof failure);
  ::_exit(127);
}

os::Fd pidfd_of(pid_t child) {
  os::Fd process = os::open_pidfd(child);
  if (process) return process;
  const int failure = errno;
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  throw with_remedy(os::errno_error("job: starting a rank: pidfd_open", failure),
                    "Use Linux 5.3 or newer, and a sandbox that allows this call");
}

using namespace std::chrono_literals;

/// Reads the environment that a process was started with. Sets an empty text if the process has ended, is a zombie, or
/// belongs to another user.
void read_environment(pid_t pid, std::string& text) {
  text.clear();
  const std::string path = "/proc/" + std::to_string(pid) + "/environ";
  const os::Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return;
  constexpr std::size_t most = 8U << 20U;  // the kernel allows 6 MiB for arguments and environment together
  std::size_t used = 0;
  while (used < most) {
    text.resize(used + (64U << 10U));
    const ssize_t got = read_some(file.get(), text.data() + used, text.size() - used);
    if (got <= 0) break;
    used += static_cast<std::size_t>(got);
  }
  text.resize(used);
}

bool has_entry(std::string_view environment, std::string_view entry) {
  for (std::size_t at = environment.find(entry); at != std::string_view::npos; at = environment.find(entry, at + 1)) {
    const std::size_t end = at + entry.size();
    if ((at == 0 || environment[at - 1] == '\0') && (end == environment.size() || environment[end] == '\0'))
      return true;
  }
  return false;
}

void send_to_all(const std::vector<os::Fd>& processes, int signal) {
  for (const os::Fd& process : processes) os::send_signal(process, signal);
}

/// Overwrites the mark of this process as /proc shows it. Otherwise the end of an outer job would kill the guard of an
/// inner job too early.
void wipe_mark() {
  const std::size_t length = std::strlen(mark_variable);
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (std::strncmp(*entry, mark_variable, length) == 0 && (*entry)[length] == '=') std::memset(*entry, '_', length);
}

[[noreturn]] void watch(int lifeline, const std::string& mark) {
  ::setsid();
  ::prctl(PR_SET_NAME, "muster-guard");
  sigset_t all;
  sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  // A program that reads the launcher's output to the end must not wait for this process.
  const int nowhere = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int standard = 0; standard < 3 && nowhere >= 0; ++standard) ::dup2(nowhere, standard);
  const unsigned kept = static_cast<unsigned>(lifeline);
  if (kept > 3) os::close_range(3, kept - 1);
  os::close_range(kept + 1);
  wipe_mark();
  char goodbye = 0;
  const ssize_t got = read_some(lifeline, &goodbye, 1);
  // Repeat until none is left: a process that was forked while the list was made is in the next list.
  for (int round = 0; got <= 0 && round < 100; ++round) {
    const std::vector<os::Fd> processes = marked_processes(mark);
    if (processes.empty() && round > 1) break;
    send_to_all(processes, SIGKILL);
    std::this_thread::sleep_for(10ms);
  }
  ::_exit(0);
}

}  // namespace

ssize_t read_some(int source, void* target, std::size_t most) noexcept {
  for (;;)
    if (const ssize_t got = ::read(source, target, most); got >= 0 || errno != EINTR) return got;
}

Pipe make_pipe(int flags) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC | flags) != 0) throw os::errno_error("job: creating a pipe");
  return {os::Fd(ends[0]), os::Fd(ends[1])};
}

ExecArguments::ExecArguments(const std::vector<std::string>& command, const Variables& variables) : command_(command) {
  std::map<std::string_view, std::string_view> given;  // the last value wins, as in a shell
  for (const auto& [name, value] : variables) given[name] = value;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string_view name = text.substr(0, text.find('='));
    if (!group::is_own_variable(name) && !given.contains(name)) environment_.emplace_back(text);
  }
  for (const auto& [name, value] : given) environment_.push_back(std::string(name) + "=" + std::string(value));
  command_pointers_ = pointers_to(command_);
  environment_pointers_ = pointers_to(environment_);
  program_ = command_pointers_.front();
}

ExecArguments ExecArguments::own_program(const Variables& variables) {
  std::error_code failure;
  const std::string name = std::filesystem::read_symlink("/proc/self/exe", failure).string();
  ExecArguments arguments({name}, variables);
  arguments.program_ = "/proc/self/exe";
  return arguments;
}

Child spawn(const ExecArguments& arguments, const Inheritance& inheritance) {
  Pipe pipe = make_pipe();
  Child child;
  child.exec_report = std::move(pipe.reader);
  const pid_t launcher = ::getpid();
  child.pid = ::fork();
  if (child.pid < 0) throw os::errno_error("job: starting a rank: fork");
  if (child.pid == 0) become(arguments, inheritance, launcher, pipe.writer.get());
  child.process = pidfd_of(child.pid);
  return child;
}

Child fork_into(const ExecArguments& arguments, const Inheritance& inheritance, const std::function<int()>& body) {
  Child child;
  const pid_t launcher = ::getpid();
  child.pid = ::fork();
  if (child.pid < 0) throw os::errno_error("job: starting a rank: fork");
  if (child.pid == 0) {
    if (take_over(inheritance, launcher) != 0) ::_exit(127);
    close_as_exec_does(inheritance.descriptors);
    environ = const_cast<char**>(arguments.environment());
    ::sigprocmask(SIG_SETMASK, &inheritance.mask, nullptr);
    std::exit(body());
  }
  child.process = pidfd_of(child.pid);
  return child;
}

int exec_error(Child& child) {
  if (!child.exec_report) return 0;
  int failure = 0;
  const ssize_t got = read_some(child.exec_report.get(), &failure, sizeof failure);
  child.exec_report.reset();
  return got == sizeof failure ? failure : 0;
}

SignalRelay::SignalRelay() {
  sigset_t wanted;
  sigemptyset(&wanted);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT}) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) sigaddset(&wanted, signal);
  }
  descriptor_ = os::Fd(::signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!descriptor_) throw os::errno_error("job: signalfd");
  ::pthread_sigmask(SIG_BLOCK, &wanted, &original_mask_);
  // If SIGCHLD were ignored, the statuses of the ranks would be lost.
  struct sigaction usual {};
  usual.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &usual, &original_child_action_);
}

SignalRelay::~SignalRelay() {
  ::sigaction(SIGCHLD, &original_child_action_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &original_mask_, nullptr);
}

std::optional<SignalRelay::Received> SignalRelay::next() {
  signalfd_siginfo info{};
  const ssize_t got = read_some(descriptor_.get(), &info, sizeof info);
  if (got != sizeof info) return std::nullopt;
  const int signal = static_cast<int>(info.ssi_signo);
  // When the terminal is closed, the kernel notifies only the session leader.
  return Received{signal, info.ssi_code == SI_KERNEL && signal != SIGHUP};
}

void SignalRelay::stop_here() const {
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTSTP);
  ::pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);
  ::raise(SIGTSTP);
  ::pthread_sigmask(SIG_BLOCK, &stop, nullptr);
}

std::vector<os::Fd> marked_processes(const std::string& mark) {
  std::vector<os::Fd> processes;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir("/proc"), ::closedir);
  if (!directory) return processes;
  const std::string entry = std::string(mark_variable) + "=" + mark;
  const pid_t self = ::getpid();
  std::string environment;
  while (const dirent* item = ::readdir(directory.get())) {
    pid_t pid = 0;
    const std::string_view name(item->d_name);
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (error != std::errc() || end != name.data() + name.size() || pid == self) continue;
    read_environment(pid, environment);
    if (!has_entry(environment, entry)) continue;
    // The number may belong to another process by now. Open a pidfd, then check the environment again.
    os::Fd process = os::open_pidfd(pid);
    if (!process) continue;
    read_environment(pid, environment);
    if (has_entry(environment, entry)) processes.push_back(std::move(process));
  }
  return processes;
}

std::size_t end_marked_processes(const std::string& mark, std::chrono::milliseconds patience) {
  std::vector<os::Fd> processes = marked_processes(mark);
  const std::size_t count = processes.size();
  if (count == 0) return 0;
  send_to_all(processes, SIGTERM);
  send_to_all(processes, SIGCONT);
  const auto deadline = os::Clock::now() + patience;
  for (const os::Fd& process : processes) os::wait_for_exit(process, deadline);
  for (int round = 0; round < 100; ++round) {
    processes = marked_processes(mark);
    if (processes.empty()) break;
    send_to_all(processes, SIGKILL);
    for (const os::Fd& process : processes) os::wait_for_exit(process, os::Clock::now() + 10ms);
  }
  return count;
}

JobGuard::JobGuard(const std::string& mark) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0)
    throw os::errno_error("job: creating a pair of sockets");
  const os::Fd far_end(ends[0]);
  lifeline_ = os::Fd(ends[1]);
  pid_ = ::fork();
  if (pid_ < 0) throw os::errno_error("job: fork");
  if (pid_ == 0) {
    lifeline_.reset();
    watch(far_end.get(), mark);
  }
}

JobGuard::~JobGuard() {
  const char goodbye = 1;
  ssize_t written = 0;
  do written = ::send(lifeline_.get(), &goodbye, 1, MSG_NOSIGNAL);
  while (written < 0 && errno == EINTR);
  lifeline_.reset();
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) continue;
}

}  // namespace muster::launch
