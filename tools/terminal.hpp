// SPDX-License-Identifier: Apache-2.0
#pragma once
// The standard streams, and the options that several commands share.

#include <CLI/CLI.hpp>

#include <optional>
#include <string>
#include <string_view>

#include "muster/error.hpp"
#include "muster/progress.hpp"
#include "src/inspect/output.hpp"
#include "src/inspect/reports.hpp"
#include "src/inspect/source.hpp"

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

/// Prints one line on standard error, after removing a progress bar. Returns `cannot`.
int complain(std::string_view words);

/// Returns a progress bar for long work, on standard error; empty if that is not a terminal. The line is cleared when
/// the work is done.
ProgressCallback progress_bar();

/// Removes the progress bar of unfinished work, so that other output can use the line.
void clear_progress_bar();

/// Adds --at, --shards and --layout (or `layout_name`): they select a part of a foreign checkpoint, and give the layout
/// of its ranks.
void add_rank_options(CLI::App& command, std::string& at, std::string& shards, std::optional<ParallelLayout>& layout,
                      const char* layout_name = "--layout");
/// Adds --job and --step, which select states of a workspace.
void add_state_options(CLI::App& command, std::string& job, std::optional<std::uint64_t>& step);
/// Adds --at, --shards, --layout and --base.
void add_checkpoint_options(CLI::App& command, Request& request);
/// Adds all of these options, --plan and --rank, for commands that inspect a source.
void add_source_options(CLI::App& command, Request& request);

/// Adds --alone to a command that never searches for the other ranks of a job, so that scripts may pass it to all
/// commands.
void add_alone_flag(CLI::App& command);

/// Adds --out, --carry, --abandoned-after and --force to a command that makes a directory.
template <class Options>
void add_output_options(CLI::App& command, std::string& out, Options& options) {
  command.add_option("-o,--out", out, "The directory to make")->type_name("DIR");
  command
      .add_option(
          "--base", options.base_model,
          "Take config.json, tokenizer and other files from this model, and hold its config against the tensors")
      ->type_name("MODEL_DIR");
  command
      .add_option("--carry", options.extra_files,
                  "Other files to copy: all, none or globs; else all but links that lead outside and other weights")
      ->type_name("GLOBS");
  command
      .add_option_function<std::string>(
          "--abandoned-after", [&options](const std::string& age) { options.stale_after = inspect::parse_age(age); },
          "Remove what other hosts left unfinished for DIR if it has not changed for this long: 30min, 2h")
      ->type_name("AGE");
  command.add_flag("--force", options.force,
                   "Replace DIR if it holds a model or shards and, beside them, only what Muster wrote");
}
/// Parses --compress: "zstd" or "zstd:3" give the level (1 by default), "none" gives nullopt. Throws
/// Error(invalid_argument).
std::optional<int> parse_compression(const std::string& text);

/// Adds --width and --ascii.
void add_style_options(CLI::App& command, inspect::OutputStyle& style);

}  // namespace muster::tools
