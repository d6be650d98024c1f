// SPDX-License-Identifier: Apache-2.0
#pragma once
// Starting a command as the ranks of a job: what `muster run` does, as a library call. The environment that ranks get
// is torchrun's (RANK, WORLD_SIZE ...), so that programs written for it run unchanged, plus MUSTER_JOB for world().
// muster/multiprocess.hpp starts functions.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster {

/// Where the ranks' output goes.
enum class RankOutput : std::uint8_t {
  inherit,   ///< the ranks write to the launcher's own standard output and error
  lines,     ///< through the launcher, in whole lines, the two streams kept apart
  prefixed,  ///< likewise, with "[rank] " before each line
  live,      ///< on a terminal one line for each rank, with what it has said last; else as `prefixed`
};

/// Several hosts, each with a launcher of its own that is given the same but for node_rank.
struct LaunchNodes {
  int nodes = 1;
  int node_rank = 0;
  /// Where the launchers meet: "tcp://HOST:PORT", an address of node 0 and a free port there; or "file:///PATH", a file
  /// that all nodes see.
  std::string rendezvous;
  std::optional<std::chrono::milliseconds> timeout = {};  ///< of the meeting; none: MUSTER_TIMEOUT, else 10 minutes
};

struct LaunchOptions {
  int ranks = 1;                                                      ///< 1 to 4096
  std::vector<std::pair<std::string, std::string>> environment = {};  ///< added to the ranks' environment
  RankOutput output = RankOutput::inherit;
  /// If it is not empty, what a rank writes goes into rank-N.out and rank-N.err there, in place of `output`; the
  /// directory is made if it is not there, and files of an earlier job are replaced.
  std::string log_directory = {};
  /// With a log directory: into the files and to `output`, which is `lines` then if it is `inherit`.
  bool tee = false;
  /// Starts the ranks of this host alone, a part of a job on several.
  std::optional<LaunchNodes> nodes = {};
  /// How long the other ranks have after one failed, to leave with their own words, before SIGTERM; and again as long
  /// between SIGTERM and SIGKILL.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  /// How long the ranks have to end after SIGTERM or SIGHUP was passed on to them, before SIGKILL. A second SIGINT
  /// within this time after another one kills them at once.
  std::chrono::milliseconds kill_after = std::chrono::seconds(30);
  /// The longest the job may run; none: for ever.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// The job's key, MUSTER_JOB. Empty: 128 random bits in hexadecimal digits, as it should be.
  std::string job = {};
  /// A rank that ends with one of these statuses has said why itself: no line about it. After a signal that was to end
  /// the job its status is the signal's.
  std::vector<int> explained = {};
  /// What its messages on standard error begin with.
  std::string name = "muster run";
};

/// What launch_local() returns beside the ranks' own statuses: output was lost; the job's time was over (as timeout(1)
/// has it); the launcher of another node is gone; and, as the shell has them, the command is not there or no program.
inline constexpr int launch_output_lost = 3;
inline constexpr int launch_timed_out = 124;
inline constexpr int launch_node_lost = 125;
inline constexpr int launch_cannot_execute = 126;
inline constexpr int launch_not_found = 127;

/// Starts `options.ranks` processes of `command` on this host and waits for all of them. Rank 0 has the caller's
/// standard input, the others have none.
///
/// Returns 0 when every rank ended with 0; else the status of the rank that failed first (128 + the signal's number
/// where one killed it), after one line on standard error that names rank, pid, status or signal, and host. The others
/// then get `grace` to end by themselves, SIGTERM, `grace` again, SIGKILL. launch_timed_out after `timeout`;
/// launch_not_found and launch_cannot_execute with one line where the command does not start; launch_output_lost with
/// one line if all ranks ended with 0 and some of their prefixed output could not be written (to a pipe that nobody
/// reads any more it is not: there the ranks hear of it themselves, by SIGPIPE). Processes that ranks left behind end
/// with the job.
///
/// SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP and SIGCONT are passed on to the ranks while it runs
/// (those of a terminal's keys reach them anyway). When the calling process dies, whatever kills it, so do the ranks.
///
/// Local. Signals of the calling thread are blocked meanwhile, so call it from the main thread of a process that has no
/// other threads; one that has its own children keeps them. Throws Error(argument) on options that cannot be, Error(io)
/// where processes, pipes or log files cannot be had, before any rank has started; with `nodes`, as tcp_group().
int launch_local(const std::vector<std::string>& command, const LaunchOptions& options = {});

}  // namespace muster
