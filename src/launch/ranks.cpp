// SPDX-License-Identifier: Apache-2.0
#include "src/launch/ranks.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string_view>

#include <sys/signalfd.h>
#include "src/os/pidfd.hpp"
#include "src/sync/start.hpp"

namespace muster::launch {
namespace {

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  pointers.reserve(texts.size() + 1);
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

/// Between fork and exec: only what is safe after the fork of a process with threads.
[[noreturn]] void become(const ExecArguments& arguments, const StandardStreams& streams, const sigset_t& mask,
                         pid_t launcher, int report) {
  int failure = 0;
  // Asked for too late, the death signal never comes: then the parent is another one already.
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) failure = errno;
  if (::getppid() != launcher) ::_exit(1);
  if (streams.input >= 0 && ::dup2(streams.input, STDIN_FILENO) < 0) failure = errno;
  if (streams.output >= 0 && ::dup2(streams.output, STDOUT_FILENO) < 0) failure = errno;
  if (streams.error >= 0 && ::dup2(streams.error, STDERR_FILENO) < 0) failure = errno;
  if (failure == 0) {
    ::sigprocmask(SIG_SETMASK, &mask, nullptr);
    ::execvpe(arguments.command()[0], arguments.command(), arguments.environment());
    failure = errno;
  }
  [[maybe_unused]] const ssize_t told = ::write(report, &failure, sizeof failure);
  ::_exit(127);
}

}  // namespace

ExecArguments::ExecArguments(const std::vector<std::string>& command, const Variables& variables) : command_(command) {
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string_view name = text.substr(0, text.find('='));
    bool replaced = sync::is_own_variable(name);
    for (const auto& variable : variables) replaced = replaced || variable.first == name;
    if (!replaced) environment_.emplace_back(text);
  }
  // The last one given wins, as in a shell.
  for (std::size_t i = 0; i < variables.size(); ++i) {
    bool given_again = false;
    for (std::size_t k = i + 1; k < variables.size(); ++k)
      given_again = given_again || variables[k].first == variables[i].first;
    if (!given_again) environment_.push_back(variables[i].first + "=" + variables[i].second);
  }
  command_pointers_ = pointers_to(command_);
  environment_pointers_ = pointers_to(environment_);
}

Child spawn(const ExecArguments& arguments, const StandardStreams& streams, const sigset_t& mask) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw os::errno_error("starting a rank: making a pipe");
  Child child;
  child.exec_report = os::Fd(ends[0]);
  const os::Fd far_end(ends[1]);
  const pid_t launcher = ::getpid();
  child.pid = ::fork();
  if (child.pid < 0) throw os::errno_error("starting a rank: fork");
  if (child.pid == 0) become(arguments, streams, mask, launcher, far_end.get());
  child.process = os::open_pidfd(child.pid);
  if (!child.process) {
    const int failure = errno;
    ::kill(child.pid, SIGKILL);
    ::waitpid(child.pid, nullptr, 0);
    throw os::errno_error("starting a rank: pidfd_open (Linux 5.3 is needed)", failure);
  }
  return child;
}

int exec_error(Child& child) {
  int failure = 0;
  ssize_t got = 0;
  do got = ::read(child.exec_report.get(), &failure, sizeof failure);
  while (got < 0 && errno == EINTR);
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
  if (!descriptor_) throw os::errno_error("starting a job: signalfd");
  ::pthread_sigmask(SIG_BLOCK, &wanted, &original_mask_);
  // Ignored, SIGCHLD would take the ranks' statuses away.
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
  ssize_t got = 0;
  do got = ::read(descriptor_.get(), &info, sizeof info);
  while (got < 0 && errno == EINTR);
  if (got != sizeof info) return std::nullopt;
  const int signal = static_cast<int>(info.ssi_signo);
  // That the terminal was closed, the kernel tells the session's leader alone.
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

}  // namespace muster::launch
