// SPDX-License-Identifier: Apache-2.0
#pragma once
// The subcommands of the program `muster`, one source file each. Each function adds its subcommand with a callback that
// sets `status`, the exit status, if it is not 0: 1 (differs, fails verification) or `cannot`. Errors are thrown;
// main() prints them.

#include <CLI/CLI.hpp>

namespace muster::tools {

/// Exit statuses that a command sets itself, in addition to those of docs/reference/exit-status.md.
inline constexpr int cannot = 2;       ///< the command cannot do its work
inline constexpr int done_unsaid = 3;  ///< the work is done, but its report could not be printed

/// The help of --plan, for every command that has it.
inline constexpr const char* plan_help =
    "How ranks share tensors: a built-in plan, a JSON file, or auto (chosen by config.json)";
inline constexpr const char* plan_type = "PLAN";
inline constexpr const char* compress_type = "METHOD";

/// The help of --key, for every command that has it.
inline constexpr const char* key_help =
    "Third-party checkpoints: dict key of the weights (nested: A/B), or the common name prefix";

/// The help of the path of the source, for every command that inspects one.
inline constexpr const char* source_help =
    "A safetensors, state or other HDF5 file, a model directory, a workspace, shards, or a third-party checkpoint";
inline constexpr const char* source_type = "PATH";

void add_run_command(CLI::App& app, int& status);
void add_ls_command(CLI::App& app, int& status);
void add_show_command(CLI::App& app, int& status);
void add_stats_command(CLI::App& app, int& status);
void add_cat_command(CLI::App& app, int& status);
void add_diff_command(CLI::App& app, int& status);
void add_fingerprint_command(CLI::App& app, int& status);
void add_verify_command(CLI::App& app, int& status);
void add_report_command(CLI::App& app, int& status);
void add_convert_command(CLI::App& app, int& status);
void add_shard_command(CLI::App& app, int& status);
void add_export_command(CLI::App& app, int& status);
void add_plan_command(CLI::App& app, int& status);
void add_publish_command(CLI::App& app, int& status);
void add_pull_command(CLI::App& app, int& status);
void add_log_command(CLI::App& app, int& status);
void add_gc_command(CLI::App& app, int& status);
void add_trace_command(CLI::App& app, int& status);
void add_status_command(CLI::App& app, int& status);
void add_doctor_command(CLI::App& app, int& status);
void add_completion_command(CLI::App& app, int& status);
void add_man_command(CLI::App& app, int& status);

}  // namespace muster::tools
