// SPDX-License-Identifier: Apache-2.0
#pragma once
// The life of a job on this host:
//
//  1. The launcher forks a guard process, which kills the job if the launcher dies unexpectedly.
//  2. The launcher starts the ranks in its own process group, so that Ctrl-C and Ctrl-Z on the terminal reach them as
//     they reach any command. Each rank has a death signal.
//  3. One thread waits for pidfds, signals to forward, messages of other launchers, and deadlines. The first rank that
//     fails determines the status. The other ranks get `grace`, then SIGTERM, `grace` again, then SIGKILL. If a SIGTERM
//     or SIGHUP is forwarded to all ranks, they get `kill_after`, then SIGKILL.
//  4. When all ranks have been reaped, here and on other nodes, the launcher ends the processes that they left behind,
//     drains the pipes, and terminates the guard.

#include <signal.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "muster/launch.hpp"
#include "src/launch/nodes.hpp"
#include "src/launch/rank_output.hpp"
#include "src/launch/ranks.hpp"
#include "src/os/clock.hpp"

namespace muster::launch {

inline constexpr int most_ranks = 4096;
/// The default port of torch.
inline constexpr int usual_port = 29500;

/// Returns the number of ranks that hold a whole model together. Throws Error(invalid_argument) if `ranks` is not a
/// multiple of it.
int ranks_of_model(int ranks, int model_parallelism, int pipeline_parallelism);
/// Throws Error(invalid_argument) for invalid options.
void check(const LaunchOptions& options);
/// Returns why a command could not be started.
std::string exec_failure(const std::string& command, int failure);

/// Starts the process of a rank with these variables in its environment. `local_rank` is its number on this host.
using Starter =
    std::function<Child(int local_rank, const ExecArguments::Variables& variables, const Inheritance& inheritance)>;

struct JobRank {
  Child child;
  bool is_alive = true;
  siginfo_t end{};
  std::chrono::steady_clock::time_point ended{};
  int order = 0;                                 ///< the position among the ranks that have ended
  bool was_told_to = false;                      ///< the launcher had sent it SIGTERM or SIGKILL
  os::Fd error_log = {};                         ///< its standard error, if that is a file
  std::optional<std::size_t> error_stream = {};  ///< its standard error, if that is a stream of the pump
};

/// Returns the exit status, or 128 plus the number of the signal that killed the process, as a shell does.
int status_of(const siginfo_t& end) noexcept;
/// Returns a text such as "ended with status 3" or "was killed by SIGSEGV (core dumped)".
std::string end_text(const siginfo_t& end);

/// The result of a job on this host.
struct JobReport {
  struct Rank {
    int rank = 0;
    pid_t pid = 0;
    int status = 0;      ///< as status_of()
    int signal = 0;      ///< the signal that killed it, or 0
    double seconds = 0;  ///< from the start of the job to the end of the rank
  };
  int status = 0;       ///< the result of launch_local()
  std::string message;  ///< of the failure, or empty
  double seconds = 0;
  std::vector<Rank> ranks;
};

class Job {
 public:
  /// Prepares `options.ranks` ranks. `place` gives their position among all ranks. `mark` identifies the processes of
  /// the job. If `speaks` is set, the job reports failures on standard error. `nodes` is null for one host. `options`
  /// must outlive the job.
  Job(const LaunchOptions& options, NodePlace place, Nodes* nodes, std::string mark, bool speaks, Starter starter);
  /// Ends all ranks that are still running.
  ~Job();
  Job& operator=(Job&&) = delete;

  /// Returns the result of launch_local().
  int run();
  /// Used after run().
  [[nodiscard]] JobReport report() const;
  /// Returns the errno of the first rank that could not be started.
  [[nodiscard]] int failed_exec() const noexcept { return failed_exec_; }
  /// Returns the message of the failure, or an empty string.
  [[nodiscard]] const std::string& words() const noexcept { return words_; }
  /// Used after run(). error_tail() returns the last output of a rank on standard error, if it passed through the
  /// launcher or into a file.
  [[nodiscard]] const std::vector<JobRank>& ranks() const noexcept { return ranks_; }
  [[nodiscard]] std::string error_tail(const JobRank& rank) const;
  /// Writes a line to standard error, if `speaks` is set.
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
  NodePlace place_;
  Nodes* nodes_;
  std::string mark_;
  bool speaks_;
  Starter starter_;
  // Made before the guard, which must not receive these signals either. Exists as long as there are ranks.
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
  int asked_by_ = 0;   // the last signal that requested the end of the job
  int passed_on_ = 0;  // the last of these signals after which ranks are killed if they do not end
  bool failed_ = false;
  bool timed_out_ = false;
  bool others_ended_ = true;  // the ranks of other nodes have ended
  int status_ = 0;
  bool is_live_ = false;  // one line per rank is drawn
  std::string words_;     // the message of the failure
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// Does the work of launch_local(), and returns a report. Throws as launch_local().
JobReport run_command(const std::vector<std::string>& command, const LaunchOptions& options);

}  // namespace muster::launch
