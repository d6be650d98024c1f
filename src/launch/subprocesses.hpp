// SPDX-License-Identifier: Apache-2.0
#pragma once
// What launch_subprocesses() tells the processes that it starts, and what they tell it:
//  1. The caller writes the call into memory without a name, and starts this program, or the call's own, once more
//     as the launcher, which has no threads and so may fork: MUSTER_CALL in its environment has the descriptors of the
//     memory and of a pipe.
//  2. The launcher is a Job. It forks the ranks, or starts this program once more for each (LaunchMethod). Each rank
//     has a pipe into which it writes the error that it ends with.
//  3. When all have ended the launcher writes the failure, if there was one, into the caller's pipe.
// run_launched_function() is what the launcher and ranks that were started by exec come to in main().

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/multiprocess.hpp"
#include "src/launch/ranks.hpp"
#include "src/os/fd.hpp"

namespace muster::launch {

inline constexpr const char* call_variable = "MUSTER_CALL";

struct CallText {
  std::string function;  ///< or
  std::vector<std::string> command;
  MultiprocessConfig config;
  SubprocessOptions options;
};
/// Throws Error(argument) on text that is no UTF-8.
std::string to_text(const CallText& call);
CallText parse_call(std::string_view text);

/// Where a rank writes its failure: a file in memory, which takes all of it at once. The pipes of a job with hundreds
/// of ranks may hold less. Throws Error(no_space).
os::Fd make_report();
/// Writes the failure of a rank into its file, or that of the launcher into the pipe to its caller.
void tell_failure(const os::Fd& report, const Error& error) noexcept;
/// Returns none if nothing was written. A pipe is read until all of it has come or its writers have ended.
std::optional<Error> read_failure(const os::Fd& report);

/// Null if there is none of that name.
RankFunction find_function(std::string_view name);
/// Whether run_launched_function() has been called.
bool has_main_hook() noexcept;
/// run_launched_function() with the status that the process is to end with, for programs that have more to end than
/// std::exit() does; none: this process is no launched one.
std::optional<int> run_if_launched();
/// Starts this program, or the call's own, once more.
ExecArguments program_of(const CallText& call, const ExecArguments::Variables& variables);

/// Runs the call as a launcher or as a rank, and returns the status to exit with.
int run_launcher(const CallText& call, const os::Fd& memory, os::Fd report);
int run_rank(const CallText& call, os::Fd report);

}  // namespace muster::launch
