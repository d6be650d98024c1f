// SPDX-License-Identifier: Apache-2.0
#pragma once
// The standard streams, and the options that several commands share.

#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/progress.hpp"
#include "src/checkpoint/source.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/reports.hpp"

namespace muster::tools {

/// Returns the columns, characters and colours of standard output. For a pipe all are off, so that names remain whole
/// for text search. NO_COLOR and TERM=dumb switch colours off.
inspect::OutputStyle output_style();

/// Opens /dev/null in place of closed standard descriptors, so that no file gets their numbers, and the output meant
/// for them. Writing to them is still an error. SIGPIPE is handled, so a closed pipe is an error, too, and does not
/// kill the program.
void prepare_standard_streams();

/// The output could not be written.
class OutputError : public Error {
 public:
  OutputError(const Error& cause, bool is_done) : Error(cause), is_done_(is_done) {}
  /// Whether the command had completed its work (print_done).
  [[nodiscard]] bool is_done() const noexcept { return is_done_; }

 private:
  bool is_done_;
};

/// Writes to standard output. Throws OutputError.
void print(std::string_view text);
/// Writes to standard output like print(), after a command that changes files has completed its work.
void print_done(std::string_view text);
/// Ensures that the output has been written. Throws OutputError.
void flush_output();

/// Names the command in messages: "muster show".
void set_called_name(std::string name);
/// Prints `muster show: error: MESSAGE` on standard error, after removing a progress bar. Returns `cannot`.
int complain(std::string_view message);
/// Prints `muster show: note: MESSAGE` on standard error.
void remark(std::string_view message);

/// Returns a progress bar for long work, on standard error; empty if that is not a terminal. The line is cleared when
/// the work is done.
ProgressCallback progress_bar();

/// Removes the progress bar of unfinished work, so that other output can use the line.
void clear_progress_bar();

/// Adds --key, --file-pattern and --from: they select a part of a third-party checkpoint, and give the layout of its
/// ranks.
void add_rank_options(CLI::App& command, std::string& key, std::string& file_pattern,
                      std::optional<ParallelLayout>& from);
/// Adds --job-id and --step, which select states of a workspace.
void add_state_options(CLI::App& command, std::string& job_id, std::optional<std::uint64_t>& step);
/// Adds --key, --file-pattern, --from and --base-model.
void add_checkpoint_options(CLI::App& command, Request& request);
/// Adds all of these options, --plan and --rank, for commands that inspect a source.
void add_source_options(CLI::App& command, Request& request);

/// Adds --json.
CLI::Option* add_json_flag(CLI::App& command, bool& json);

/// Adds --dtype and --cast-all.
void add_cast_options(CLI::App& command, std::optional<DType>& dtype, bool& cast_all);

/// Adds --select and --exclude, which may be repeated. `select` and `exclude` become one glob each.
void add_name_options(CLI::App& command, std::string& select, std::string& exclude);
/// Adds these options, --only-dtype and --larger-than, for commands that list tensors.
void add_filter_options(CLI::App& command, TensorFilter& filter);

/// Adds --sort, whose value is one of `orders`. If `has_default` is set, the first one is the default in the help.
CLI::Option* add_sort_option(CLI::App& command, std::string& order, const std::vector<std::string>& orders,
                             const std::string& help, bool has_default = true);

/// Adds an option whose value is a size in bytes.
void add_size_option(CLI::App& command, const char* name, std::uint64_t& value, const char* help,
                     const char* otherwise = "");
/// Adds an option whose value is a time, such as 90s or 12h.
CLI::Option* add_age_option(CLI::App& command, const char* name, const std::function<void(std::chrono::seconds)>& set,
                            const char* help);
/// Adds --stale-after, whose value is a time.
void add_stale_option(CLI::App& command, std::optional<std::chrono::seconds>& value, const char* help);

/// Adds --out, --base-model, --extra-files, --stale-after and --force to a command that makes a directory.
template <class Options>
void add_output_options(CLI::App& command, std::string& out, Options& options) {
  command.add_option("-o,--out", out, "Directory to create")->type_name("DIR");
  command
      .add_option("--base-model", options.base_model,
                  "Model directory: source of config.json, the tokenizer and other files, and of the expected tensors")
      ->type_name("DIR");
  command
      .add_option("--extra-files", options.extra_files,
                  "Other files to copy: all, none or globs; default: all but links that lead outside and other weights")
      ->type_name("GLOBS");
  add_stale_option(command, options.stale_after,
                   "Delete unfinished output of other hosts for DIR if it has not changed for this long: 30min, 2h");
  command.add_flag("--force", options.force,
                   "Replace DIR if it holds a model or shards, and otherwise only files that Muster wrote");
}
/// Parses --compress: "zstd" or "zstd:3" give the level (1 by default), "none" gives nullopt. Throws
/// Error(invalid_argument).
std::optional<int> parse_compression(const std::string& text);

/// Throws Error(invalid_argument) if `path` exists and `force` is not set, or if it is not a regular file.
void check_new_file(const std::string& path, bool force);
/// Writes a file that consists of the pieces that write(sink) passes to its sink, and replaces an existing file. It
/// appears complete or not at all. Leftovers of a killed command for this file are removed. The data need not be on the
/// disk when the call returns. If `path` cannot be written, the call throws before it calls write(). Throws as
/// os::PublishedFile.
void write_output_file(const std::string& path, const std::function<void(const inspect::Sink&)>& write);

/// Adds --width and --ascii.
void add_style_options(CLI::App& command, inspect::OutputStyle& style);

}  // namespace muster::tools
