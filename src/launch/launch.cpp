// SPDX-License-Identifier: Apache-2.0
// The life of a job:
//  1. A guard process is forked; it kills the job when the launcher dies without a word.
//  2. The ranks are forked, in the launcher's own process group, so that a terminal's Ctrl-C and Ctrl-Z reach them as
//     they reach any command, and each with a death signal.
//  3. One thread waits for pidfds, signals to pass on and deadlines. The first rank that fails decides the status; the
//     others get `grace`, SIGTERM, `grace`, SIGKILL. A SIGTERM or SIGHUP that is passed on to all: `kill_after`,
//     SIGKILL.
//  4. When all ranks are reaped, processes that they left behind are ended, the pipes are read to their end, and the
//     guard is sent home.
#include "muster/launch.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/launch/ranks.hpp"
#include "src/os/process.hpp"
#include "src/sync/settings.hpp"

namespace muster {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int most_ranks = 4096;

void check(const std::vector<std::string>& command, const LaunchOptions& options) {
  if (command.empty()) throw Error(ErrorKind::argument, "starting a job: no command given");
  if (options.ranks < 1 || options.ranks > most_ranks)
    throw Error(ErrorKind::argument, "starting a job: " + std::to_string(options.ranks) + " ranks asked for, 1 to " +
                                         std::to_string(most_ranks) + " can be started");
  if (options.grace < 0ms || options.kill_after < 0ms || (options.timeout && *options.timeout <= 0ms))
    throw Error(ErrorKind::argument, "starting a job: the times to wait must not be negative");
  for (const auto& [name, value] : options.environment)
    if (name.empty() || name.find('=') != std::string::npos || (name + value).find('\0') != std::string::npos)
      throw Error(ErrorKind::argument, "starting a job: \"" + name + "\" cannot be an environment variable");
}

/// A TCP port that is free now: torch and others listen on it, Muster does not.
std::string free_port() {
  const os::Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (!socket || ::bind(socket.get(), generic, length) != 0 || ::getsockname(socket.get(), generic, &length) != 0)
    return "29500";  // no loopback in this sandbox: the usual number, that nobody can listen on anyway
  return std::to_string(ntohs(address.sin_port));
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? "SIG" + std::string(name) : "signal " + std::to_string(signal);
}

class Job {
 public:
  Job(const std::vector<std::string>& command, const LaunchOptions& options)
      : options_(options),
        command_(command),
        job_(options.job.empty() ? os::random_hex(16) : options.job),
        port_(free_port()),
        guard_(job_) {}
  /// Whatever ended the start or the wait: no rank outlives it.
  ~Job() {
    for (Rank& rank : ranks_)
      if (rank.alive) {
        os::send_signal(rank.child.process, SIGKILL);
        reap(rank);
      }
    launch::end_job_processes(job_, 0ms);
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int run() {
    start();
    if (const int failure = wait_for_exec(); failure != 0) return failure;
    pump_.start();
    supervise();
    const std::size_t left = launch::end_job_processes(job_, std::min<std::chrono::milliseconds>(options_.grace, 1s));
    // Whoever reads the rest of the output may be stopped for ever: signals end this process again.
    signals_.reset();
    if (const int failure = pump_.finish(2s); failure != 0) {
      say(os::errno_error("writing the ranks' output", failure).what());
      if (status_ == 0) status_ = launch_output_lost;
    }
    if (left > 0)
      say("ended " + std::to_string(left) + (left == 1 ? " process" : " processes") + " that ranks left behind");
    return status_;
  }

 private:
  struct Rank {
    launch::Child child;
    bool alive = true;
    siginfo_t end{};
  };
  enum class Phase { running, grace, terminated, killed };

  void say(const std::string& words) const {
    const std::string line = options_.name + ": " + escaped(words) + "\n";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  }

  void start() {
    const os::Fd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!nothing) throw os::errno_error("starting a job: opening /dev/null");
    ranks_.reserve(static_cast<std::size_t>(options_.ranks));
    for (int rank = 0; rank < options_.ranks; ++rank) {
      launch::StandardStreams streams;
      if (rank > 0) streams.input = nothing.get();
      os::Fd output, error;
      if (options_.output == RankOutput::prefixed) {
        const std::string prefix = "[" + std::to_string(rank) + "] ";
        output = pumped(STDOUT_FILENO, prefix);
        error = pumped(STDERR_FILENO, prefix);
        streams.output = output.get();
        streams.error = error.get();
      }
      ranks_.push_back(
          {launch::spawn(launch::ExecArguments(command_, variables(rank)), streams, signals_->original_mask()),
           true,
           {}});
      // A command that cannot be started is known from the first rank, before the others are.
      if (rank == 0) failed_exec_ = launch::exec_error(ranks_[0].child);
      if (failed_exec_ != 0) return;
    }
  }

  launch::ExecArguments::Variables variables(int rank) const {
    launch::ExecArguments::Variables all = options_.environment;
    const std::string size = std::to_string(options_.ranks);
    for (const char* name : {"RANK", "LOCAL_RANK"}) all.emplace_back(name, std::to_string(rank));
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) all.emplace_back(name, size);
    all.emplace_back("MASTER_ADDR", "127.0.0.1");
    all.emplace_back("MASTER_PORT", port_);
    all.emplace_back(launch::job_variable, job_);
    return all;
  }

  /// The end of a new pipe that a rank writes to.
  os::Fd pumped(int target, const std::string& prefix) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw os::errno_error("starting a job: making a pipe");
    pump_.add(os::Fd(ends[0]), target, prefix);
    return os::Fd(ends[1]);
  }

  int wait_for_exec() {
    for (std::size_t rank = 1; rank < ranks_.size() && failed_exec_ == 0; ++rank)
      failed_exec_ = launch::exec_error(ranks_[rank].child);
    if (failed_exec_ == 0) return 0;
    const bool missing = failed_exec_ == ENOENT;
    say("starting " + command_[0] + " failed: " + std::strerror(failed_exec_) +
        (missing ? " (is it installed, and its name or path right?)" : ""));
    return missing ? launch_not_found : launch_cannot_execute;
  }

  static void reap(Rank& rank) {
    while (::waitid(P_PIDFD, static_cast<id_t>(rank.child.process.get()), &rank.end, WEXITED) != 0 && errno == EINTR)
      continue;
    rank.alive = false;
  }

  static int status_of(const siginfo_t& end) { return end.si_code == CLD_EXITED ? end.si_status : 128 + end.si_status; }

  void supervise() {
    if (options_.timeout) timeout_ = Clock::now() + sync::bounded(*options_.timeout);
    std::vector<pollfd> wanted;
    std::vector<std::size_t> whose;
    for (;;) {
      wanted.assign(1, {signals_->descriptor(), POLLIN, 0});
      whose.clear();
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (!ranks_[rank].alive) continue;
        wanted.push_back({ranks_[rank].child.process.get(), POLLIN, 0});
        whose.push_back(rank);
      }
      if (whose.empty()) return;
      const int ready = ::poll(wanted.data(), wanted.size(), milliseconds_left());
      if (ready < 0 && errno != EINTR) throw os::errno_error("waiting for the ranks: poll");
      std::vector<std::size_t> ended;
      for (std::size_t i = 0; ready > 0 && i < whose.size(); ++i)
        if (wanted[i + 1].revents != 0) ended.push_back(whose[i]);
      for (const std::size_t rank : ended) reap(ranks_[rank]);
      const bool stops = ready > 0 && wanted[0].revents != 0 && pass_signals_on();
      judge(ended);
      if (stops) signals_->stop_here();
      keep_deadlines();
    }
  }

  /// Finds the first failure. Among ranks that ended between two looks, one that was killed is the likelier cause: the
  /// others leave because they lost it.
  void judge(const std::vector<std::size_t>& ended) {
    if (failed_ || timed_out_) return;
    const Rank* first = nullptr;
    for (const std::size_t index : ended) {
      const Rank& rank = ranks_[index];
      if (status_of(rank.end) == 0) continue;
      if (first == nullptr || (first->end.si_code == CLD_EXITED && rank.end.si_code != CLD_EXITED)) first = &rank;
    }
    if (first == nullptr) return;
    failed_ = true;
    const bool is_explained =
        first->end.si_code == CLD_EXITED && std::ranges::count(options_.explained, first->end.si_status) != 0;
    // It may have heard of a signal from another rank, before the signal came to this one.
    const bool is_asked = asked_by_ == SIGINT ? is_interrupted() : asked_by_ != 0;
    status_ = is_explained && is_asked ? 128 + asked_by_ : status_of(first->end);
    if (phase_ == Phase::killed) return;  // that was said
    if (phase_ == Phase::running) enter(Phase::grace, options_.grace);
    if (is_explained) return;
    std::string words = "rank " + std::to_string(first - ranks_.data()) + " (pid " + std::to_string(first->child.pid) +
                        ") on host " + os::host_name();
    if (first->end.si_code == CLD_EXITED)
      words += " ended with status " + std::to_string(first->end.si_status);
    else
      words += " was killed by " + signal_name(first->end.si_status) +
               (first->end.si_code == CLD_DUMPED ? " (core dumped)" : "");
    const bool others = std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.alive; });
    say(words + (others ? "; ending the others" : ""));
  }

  /// Just now.
  [[nodiscard]] bool is_interrupted() const {
    return interrupted_ && Clock::now() - *interrupted_ < options_.kill_after;
  }

  /// Whether the launcher is to stop, too.
  bool pass_signals_on() {
    bool stops = false;
    while (const auto received = signals_->next()) {
      for (const Rank& rank : ranks_) {
        if (!rank.alive) continue;
        // Those that left our group do not hear the terminal.
        if (received->from_terminal && ::getpgid(rank.child.pid) == ::getpgrp()) continue;
        os::send_signal(rank.child.process, received->signal);
      }
      stops = stops || received->signal == SIGTSTP;
      if (received->signal == SIGINT || received->signal == SIGTERM || received->signal == SIGHUP)
        asked_by_ = received->signal;
      if (received->signal == SIGINT) {
        if (is_interrupted()) {
          say("interrupted again: killing the ranks");
          end_ranks(SIGKILL);
        }
        interrupted_ = Clock::now();
      } else if ((received->signal == SIGTERM || received->signal == SIGHUP) && phase_ == Phase::running) {
        passed_on_ = received->signal;
        enter(Phase::terminated, options_.kill_after);
      }
    }
    return stops;
  }

  void enter(Phase phase, std::chrono::milliseconds longest) {
    phase_ = phase;
    phase_end_ = Clock::now() + sync::timeout_of(longest, {});
  }

  void end_ranks(int signal) {
    for (const Rank& rank : ranks_) {
      if (!rank.alive) continue;
      os::send_signal(rank.child.process, signal);
      os::send_signal(rank.child.process, SIGCONT);  // a stopped one cannot leave
    }
    enter(signal == SIGKILL ? Phase::killed : Phase::terminated, options_.grace);
  }

  void keep_deadlines() {
    const auto now = Clock::now();
    if (phase_ == Phase::running) {
      if (!timeout_ || now < *timeout_) return;
      timed_out_ = true;
      status_ = launch_timed_out;
      say(fmt::format("the job has not ended within its {:g} s; ending all ranks",
                      std::chrono::duration<double>(*options_.timeout).count()));
    } else if (phase_ == Phase::killed || now < phase_end_) {
      return;
    }
    if (phase_ == Phase::terminated && passed_on_ != 0)
      say(fmt::format("{} of {} ranks have not ended {:g} s after {}: killing them",
                      std::ranges::count(ranks_, true, &Rank::alive), ranks_.size(),
                      std::chrono::duration<double>(options_.kill_after).count(), signal_name(passed_on_)));
    end_ranks(phase_ == Phase::terminated ? SIGKILL : SIGTERM);
  }

  [[nodiscard]] int milliseconds_left() const {
    std::optional<Clock::time_point> end = phase_end_;
    if (phase_ == Phase::running) end = timeout_;
    if (phase_ == Phase::killed || !end) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*end - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000));
  }

  const LaunchOptions& options_;
  const std::vector<std::string>& command_;
  std::string job_;
  std::string port_;
  // Before the guard, which must not hear them either; as long as there are ranks.
  std::optional<launch::SignalRelay> signals_{std::in_place};
  launch::JobGuard guard_;
  std::vector<Rank> ranks_;
  launch::LinePump pump_;
  int failed_exec_ = 0;
  Phase phase_ = Phase::running;
  Clock::time_point phase_end_{};
  std::optional<Clock::time_point> timeout_;
  std::optional<Clock::time_point> interrupted_;
  int asked_by_ = 0;   // the last signal that was to end the job
  int passed_on_ = 0;  // of these the one that ranks are killed after if they do not end
  bool failed_ = false;
  bool timed_out_ = false;
  int status_ = 0;
};

}  // namespace

int launch_local(const std::vector<std::string>& command, const LaunchOptions& options) {
  check(command, options);
  Job job(command, options);
  return job.run();
}

}  // namespace muster
