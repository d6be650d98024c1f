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

/// Columns, characters and colours of standard output. A pipe has none of them: names stay whole for whoever searches
/// them. NO_COLOR and TERM=dumb switch colours off.
inspect::OutputStyle output_style();

/// Opens /dev/null in place of closed standard descriptors, so that no file gets their numbers and the words that are
/// meant for them, in such a way that writing is still an error. A pipe that nobody reads is an error, too, not the
/// program's end.
void prepare_standard_streams();

/// What was to be printed did not arrive.
class OutputError : public Error {
 public:
  OutputError(const Error& cause, bool is_done) : Error(cause), is_done_(is_done) {}
  /// The command had done all that it was called for (print_done).
  [[nodiscard]] bool is_done() const noexcept { return is_done_; }

 private:
  bool is_done_;
};

/// Writes to standard output. Throws OutputError.
void print(std::string_view text);
/// The same of a command that has changed files, when it has done all of it.
void print_done(std::string_view text);
/// What was printed has arrived. Throws OutputError.
void flush_output();

/// One line on standard error, after a progress bar is taken away. Returns `cannot`.
int complain(std::string_view words);

/// A bar for long work, on standard error: empty if that is no terminal. The line is cleared when the work is done.
ProgressCallback progress_bar();

/// Takes away what is drawn of unfinished work, so that other words have the line.
void clear_progress_bar();

/// --at, --shards and --layout (or `layout_name`): what of a foreign checkpoint is meant, and how ranks were cut.
void add_rank_options(CLI::App& command, std::string& at, std::string& shards, std::optional<ParallelLayout>& layout,
                      const char* layout_name = "--layout");
/// --job and --generation: what of a workspace is meant.
void add_state_options(CLI::App& command, std::string& job, std::optional<std::uint64_t>& generation);
/// The first three, and --base.
void add_checkpoint_options(CLI::App& command, Request& request);
/// All of these, --plan and --rank: for commands that look at what there is.
void add_source_options(CLI::App& command, Request& request);

/// --alone of a command that never looks for the other ranks of a job: scripts may say it of all commands.
void add_alone_flag(CLI::App& command);

/// --out, --carry, --abandoned-after and --force of a command that makes a directory, with muster's options of it.
template <class Options>
void add_output_options(CLI::App& command, std::string& out, Options& options) {
  command.add_option("-o,--out", out, "The directory to make")->type_name("DIR");
  command
      .add_option(
          "--base", options.base,
          "Take config.json, tokenizer and other files from this model, and hold its config against the tensors")
      ->type_name("MODEL_DIR");
  command
      .add_option("--carry", options.carry,
                  "Other files to copy: all, none or globs; else all but links that lead outside and other weights")
      ->type_name("GLOBS");
  command
      .add_option_function<std::string>(
          "--abandoned-after",
          [&options](const std::string& age) { options.abandoned_after = inspect::parse_age(age); },
          "Remove what other hosts left unfinished for DIR if it has not changed for this long: 30min, 2h")
      ->type_name("AGE");
  command.add_flag("--force", options.force,
                   "Replace DIR if it holds a model or shards and, beside them, only what Muster wrote");
}
/// --compress: "zstd" or "zstd:3", the level, 1 if none is given; "none": none. Throws Error(argument).
std::optional<int> parse_compression(const std::string& text);

/// --width and --ascii.
void add_style_options(CLI::App& command, inspect::OutputStyle& style);

}  // namespace muster::tools
