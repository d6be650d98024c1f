// SPDX-License-Identifier: Apache-2.0
#pragma once
// The life of a job on this host:
//  1. A guard process is forked; it kills the job when the launcher dies without a word.
//  2. The ranks are started in the launcher's own process group, so that a terminal's Ctrl-C and Ctrl-Z reach them as
//     they reach any command, and each with a death signal.
//  3. One thread waits for pidfds, signals to pass on, news of other launchers and deadlines. The first rank that fails
//     decides the status; the others get `grace`, SIGTERM, `grace`, SIGKILL. A SIGTERM or SIGHUP that is passed on to
//     all: `kill_after`, SIGKILL.
//  4. When all ranks are reaped, here and on other nodes, processes that they left behind are ended, the pipes are read
//     to their end, and the guard is sent home.

#include <signal.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "muster/launch.hpp"
#include "src/launch/nodes.hpp"
#include "src/launch/output.hpp"
#include "src/launch/ranks.hpp"
#include "src/os/clock.hpp"

namespace muster::launch {

inline constexpr int most_ranks = 4096;
/// torch's.
inline constexpr int usual_port = 29500;

/// Ranks that have a whole model together. Throws Error(argument) if so many ranks are no multiple of that.
int ranks_of_model(int ranks, int model_parallelism, int pipeline_parallelism);
/// Throws Error(argument) on options that cannot be.
void check(const LaunchOptions& options);
/// Why a command could not be started.
std::string exec_failure(const std::string& command, int failure);

/// Makes the process of a rank (its number on this host) with these variables in its environment.
using Starter =
    std::function<Child(int local_rank, const ExecArguments::Variables& variables, const Inheritance& inheritance)>;

struct JobRank {
  Child child;
  bool is_alive = true;
  siginfo_t end{};
  int order = 0;                                 ///< among those that have ended
  bool was_told_to = false;                      ///< by SIGTERM or SIGKILL of the launcher
  os::Fd error_log = {};                         ///< what it wrote to standard error, if that is a file
  std::optional<std::size_t> error_stream = {};  ///< or a stream of the pump
};

/// 128 + the signal that killed it, as the shell has it.
int status_of(const siginfo_t& end) noexcept;
/// "ended with status 3", "was killed by SIGSEGV (core dumped)".
std::string end_text(const siginfo_t& end);

class Job {
 public:
  /// `options.ranks` of them, at that place among all. `mark`: of the processes; `speaks`: whether it says on standard
  /// error what went wrong. `nodes` is null for one host. The options outlive it.
  Job(const LaunchOptions& options, Place place, Nodes* nodes, std::string mark, bool speaks, Starter starter);
  /// Whatever ended the start or the wait: no rank outlives it.
  ~Job();
  Job& operator=(Job&&) = delete;

  /// Returns what launch_local() returns.
  int run();
  /// errno of the first rank that could not be started.
  [[nodiscard]] int failed_exec() const noexcept { return failed_exec_; }
  /// Of the failure, if there was one.
  [[nodiscard]] const std::string& words() const noexcept { return words_; }
  /// After run(). What the ranks wrote to standard error last, if it went through the launcher or into a file.
  [[nodiscard]] const std::vector<JobRank>& ranks() const noexcept { return ranks_; }
  [[nodiscard]] std::string error_tail(const JobRank& rank) const;
  /// A line on standard error, if it speaks.
  void say(const std::string& words) const;

 private:
  using Clock = os::Clock;
  enum class Phase : std::uint8_t { running, grace, terminated, killed };

  void start();
  void direct_output(int rank, JobRank& started, Inheritance& inheritance, os::Fd& output, os::Fd& error);
  [[nodiscard]] ExecArguments::Variables variables(int rank) const;
  bool wait_for_exec();
  void reap(JobRank& rank);
  void supervise();
  void judge(const std::vector<std::size_t>& ended);
  void hear_of_other_nodes();
  [[nodiscard]] bool is_interrupted() const;
  bool pass_signals_on();
  void enter(Phase phase, std::chrono::milliseconds longest);
  void end_ranks(int signal);
  void keep_deadlines();
  [[nodiscard]] int milliseconds_left() const;

  const LaunchOptions& options_;
  Place place_;
  Nodes* nodes_;
  std::string mark_;
  bool speaks_;
  Starter starter_;
  // Before the guard, which must not hear them either; as long as there are ranks.
  std::optional<SignalRelay> signals_{std::in_place};
  JobGuard guard_;
  std::vector<JobRank> ranks_;
  OutputPump pump_;
  int failed_exec_ = 0;
  int ended_ = 0;
  Phase phase_ = Phase::running;
  Clock::time_point phase_end_{};
  std::optional<Clock::time_point> timeout_;
  std::optional<Clock::time_point> interrupted_;
  int asked_by_ = 0;   // the last signal that was to end the job
  int passed_on_ = 0;  // of these the one that ranks are killed after if they do not end
  bool failed_ = false;
  bool timed_out_ = false;
  bool others_ended_ = true;  // the ranks of other nodes
  int status_ = 0;
  bool is_live_ = false;  // a line for each rank is drawn
  std::string words_;     // of the failure
};

}  // namespace muster::launch
