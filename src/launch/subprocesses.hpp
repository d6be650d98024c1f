// SPDX-License-Identifier: Apache-2.0
#pragma once
// The protocol between launch_subprocesses() and the processes that it starts:
//
//  1. The caller writes the call into anonymous memory. It starts this program, or the program of the call, again as
//     the launcher. The launcher has no threads, so it may fork. MUSTER_LAUNCH_SPEC in its environment contains the
//     descriptors of the memory and of a pipe.
//  2. The launcher is a Job. It forks the ranks, or starts this program again for each of them (LaunchMethod). Each
//     rank has a file in memory into which it writes its error.
//  3. When all ranks have ended, the launcher writes the failure, if there was one, into the pipe of the caller.
// The launcher, and ranks that were started by exec, enter run_launched_function() in main().

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/compat/multiprocess.hpp"
#include "muster/error.hpp"
#include "src/launch/ranks.hpp"
#include "src/os/fd.hpp"

namespace muster::launch {

inline constexpr const char* call_variable = "MUSTER_LAUNCH_SPEC";

struct CallText {
  std::string function;  ///< the function to run, or
  std::vector<std::string> command;
  MultiprocessConfig config;
  SubprocessOptions options;
};
/// Throws Error(invalid_argument) for text that is not valid UTF-8.
std::string to_text(const CallText& call);
CallText parse_call(std::string_view text);

/// Makes a file in memory for the failure of a rank, which can hold all of it at once. A pipe may be too small: the
/// pipes of a job with hundreds of ranks have a reduced size. Throws Error(out_of_space).
os::Fd make_report();
/// Writes the failure of a rank into its file, or that of the launcher into the pipe to its caller.
void tell_failure(const os::Fd& report, const Error& error) noexcept;
/// Returns nullopt if nothing was written. Reads a pipe until the failure is complete or its writers have ended.
std::optional<Error> read_failure(const os::Fd& report);

/// Returns null if there is no function with that name.
RankFunction find_function(std::string_view name);
/// Returns whether run_launched_function() has been called.
bool has_main_hook() noexcept;
/// Behaves as run_launched_function(), but returns the exit status, for programs that must do more at their end than
/// std::exit() does. Returns nullopt if this process was not launched.
std::optional<int> run_if_launched();
/// Returns the arguments to start this program, or the program of the call, again.
ExecArguments program_of(const CallText& call, const ExecArguments::Variables& variables);

/// Run the call as the launcher or as a rank. Return the exit status.
int run_launcher(const CallText& call, const os::Fd& memory, os::Fd report);
int run_rank(const CallText& call, os::Fd report);

}  // namespace muster::launch
