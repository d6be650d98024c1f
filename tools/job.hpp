// SPDX-License-Identifier: Apache-2.0
#pragma once
// Commands that the ranks of a job call together, and that start local ranks themselves outside of a job.

#include <CLI/CLI.hpp>

#include <functional>
#include <string>
#include <vector>

#include "muster/group.hpp"

namespace muster::tools {

/// The options --processes and --standalone.
struct JobArguments {
  int processes = 0;
  bool standalone = false;
};
/// Adds both options. `verb` is the verb of the command, "export", and `otherwise` the default of --processes.
void add_job_options(CLI::App& command, JobArguments& job, const std::string& verb, const std::string& otherwise);

/// Calls in_job(group) with the ranks of the job to which this process belongs, and alone() if it belongs to none.
/// Prints a hint if the other ranks do not arrive, because a script may call the command on one rank only. Throws
/// Error(invalid_argument) if --processes is used inside a job.
int as_called(const CLI::App& command, const JobArguments& job, const std::function<int()>& alone,
              const std::function<int(Group&)>& in_job);

/// Runs the command with this many local ranks, or in_job() in this process if `ranks` is 1. The ranks get the options
/// of the command line, and then `arguments`.
int with_local_ranks(const CLI::App& command, int ranks, const std::vector<std::string>& arguments,
                     const std::function<int(Group&)>& in_job);

/// Runs work(). All ranks have the same error, so only rank 0 reports it, unless rank 0 may be the lost one: on the
/// other ranks the result is `cannot`.
int reported_once(const Group& group, const std::function<int()>& work);

}  // namespace muster::tools
