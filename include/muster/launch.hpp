// SPDX-License-Identifier: Apache-2.0
#pragma once
// Starts a command as the ranks of a job, as `muster run` does. The environment of the ranks is that of torchrun (RANK,
// WORLD_SIZE ...), so programs written for torchrun run unchanged, plus MUSTER_JOB for world(). Use
// muster/compat/multiprocess.hpp to start functions.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster {

/// The destination of the output of the ranks.
enum class RankOutput : std::uint8_t {
  inherit,   ///< the ranks write to the standard output and error of the launcher
  lines,     ///< the launcher forwards complete lines and keeps the two streams separate
  prefixed,  ///< as `lines`, with "[rank] " in front of each line
  live,      ///< on a terminal: one line per rank, with its latest output; otherwise as `prefixed`
};

/// A job on several hosts. Each host has a launcher with the same options, except node_rank.
struct LaunchNodes {
  /// Number of hosts.
  int nodes = 1;
  /// Number of this host, from 0.
  int node_rank = 0;
  /// The rendezvous address of the launchers: "tcp://HOST:PORT", an address of node 0 with a free port, or
  /// "file:///PATH", a file that all nodes see.
  std::string rendezvous;
  std::optional<std::chrono::milliseconds> timeout =
      {};  ///< for the rendezvous; unset: MUSTER_TIMEOUT, else 10 minutes
};

/// Options of launch_local().
struct LaunchOptions {
  int ranks = 1;  ///< number of ranks, 1 to 4096
  /// Variables added to the environment of the ranks.
  std::vector<std::pair<std::string, std::string>> environment = {};
  /// The destination of the output of the ranks.
  RankOutput output = RankOutput::inherit;
  /// If it is not empty, the output of rank N is written to rank-N.out and rank-N.err in this directory, instead of to
  /// `output`. The directory is created if it does not exist, and files of an earlier job are replaced.
  std::string log_directory = {};
  /// With a log directory: writes to the files and to `output`, which becomes `lines` if it is `inherit`.
  bool tee = false;
  /// For a job on several hosts: starts only the ranks of this host.
  std::optional<LaunchNodes> nodes = {};
  /// After a rank has failed, the time that the other ranks have to report their own errors and exit, before SIGTERM.
  /// The same time passes between SIGTERM and SIGKILL.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  /// The time between passing on SIGTERM or SIGHUP to the ranks, and SIGKILL. A second SIGINT within this time kills
  /// the ranks at once.
  std::chrono::milliseconds kill_after = std::chrono::seconds(30);
  /// The longest duration of the job. Unset: no limit.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// The key of the job, MUSTER_JOB. Empty (recommended): 128 random bits as hexadecimal digits.
  std::string job = {};
  /// Exit statuses of ranks that have already reported their error. The launcher prints no message about such a rank.
  /// If a signal ended the job, the status of that rank is that of the signal.
  std::vector<int> explained = {};
  /// The prefix of the messages of the launcher on standard error.
  std::string name = "muster run";
};

/// Further return values of launch_local(). They report that output was lost; that the job exceeded its timeout (as
/// timeout(1)); that the launcher of another node was lost; and, as in the shell, that the command cannot be executed
/// or was not found.
inline constexpr int launch_output_lost = 3;
/// The job exceeded its timeout.
inline constexpr int launch_timed_out = 124;
/// The launcher of another node was lost.
inline constexpr int launch_node_lost = 125;
/// The command cannot be executed.
inline constexpr int launch_cannot_execute = 126;
/// The command was not found.
inline constexpr int launch_not_found = 127;

/// Starts `options.ranks` processes of `command` on this host and waits for all of them. Rank 0 has the standard input
/// of the caller; the other ranks have no standard input. Local.
///
/// Returns 0 if every rank exited with 0. Otherwise it prints one line on standard error with the rank, pid, status or
/// signal, and host of the rank that failed first. It returns the status of that rank, or 128 + the signal number if a
/// signal killed it. The other ranks have `grace` to exit by themselves, then receive SIGTERM, and SIGKILL after
/// `grace` again. Processes that ranks have left behind are ended with the job.
///
/// Returns launch_timed_out after `timeout`. Returns launch_not_found or launch_cannot_execute, with one line, if the
/// command does not start. Returns launch_output_lost, with one line, if all ranks exited with 0 but some of their
/// prefixed output could not be written. A pipe without a reader is not reported this way: the ranks receive SIGPIPE.
///
/// SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP and SIGCONT are passed on to the ranks while they run.
/// Signals of terminal keys reach the ranks directly. If the calling process dies for any reason, the ranks are killed.
///
/// Signals of the calling thread are blocked during the call. Call it from the main thread of a process that has no
/// other threads. The process may have other children. Throws Error(invalid_argument) if options are invalid. Throws
/// Error(io), before any rank has started, if processes, pipes or log files cannot be created. With `nodes`, throws
/// also as tcp_group().
int launch_local(const std::vector<std::string>& command, const LaunchOptions& options = {});

}  // namespace muster
