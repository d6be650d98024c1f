// SPDX-License-Identifier: Apache-2.0
// muster convert: safetensors to state file, and the reverse.

#include <fmt/core.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "muster/error.hpp"
#include "muster/safetensors.hpp"
#include "muster/state_file.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/export.hpp"
#include "src/checkpoint/assembly/shard_set.hpp"
#include "src/core/thread_pool.hpp"
#include "src/os/publish.hpp"
#include "tools/commands.hpp"
#include "tools/interruption.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

namespace fs = std::filesystem;

struct ConvertArguments {
  std::string in;
  std::string out;
  std::string compress = "none";
  thirdparty::Choice foreign;
  TensorFilter filter;
  bool json = false;
  bool force = false;
  bool skips_unreadable = false;
};

Config config_of(const Source& source) {
  return source.kind == "state" ? *source.config() : config_from_converted(source.metadata);
}

void write_safetensors(const Source& source, const std::string& out, ProgressCounter& progress) {
  Metadata metadata = source.kind == "state" ? metadata_for_conversion(*source.config()) : source.metadata;
  // Loaders of other projects check this key before they read a file.
  if (source.kind != "state") metadata.try_emplace("format", "pt");
  SafetensorsWriter writer(out, source.entries(), std::move(metadata));
  // In order, the elements of a state are verified against their checksums.
  for_each_piece(*source.tensors, !source.states.empty(), progress,
                 [&](std::size_t tensor, std::uint64_t offset, std::span<const std::byte> bytes) {
                   writer.write(source.entries()[tensor].name, offset, bytes);
                 });
  writer.commit();
}

/// Writes a state file. If the source is a state file, its rank and job are kept.
void write_state(const Source& source, const std::string& out, const std::optional<int>& zstd_level,
                 ProgressCounter& progress) {
  StateFileOptions state{.zstd_level = zstd_level};
  if (source.kind == "state") state.info = source.states.front().info();
  write_state_file(*source.tensors, out, config_of(source), state, progress);
}

void check_paths(const ConvertArguments& arguments) {
  const auto refuse = [&](const std::string& path, const std::string& cause) {
    throw Error(ErrorKind::invalid_argument, fmt::format("{}: {}", in_quotes(path), cause), {.path = path});
  };
  std::error_code error;
  if (fs::is_directory(arguments.in, error) && !thirdparty::find_checkpoint(arguments.in))
    refuse(arguments.in, "is a directory. Use muster export or muster shard for directories");
  if (fs::equivalent(arguments.in, arguments.out, error))
    refuse(arguments.out, "the output is the input file. Name another file");
  check_new_file(arguments.out, arguments.force);
}

/// Whether the name is that of a state file.
bool is_state_name(const std::string& path) {
  if (path.ends_with(".h5") || path.ends_with(".hdf5")) return true;
  if (path.ends_with(".safetensors")) return false;
  throw Error(ErrorKind::invalid_argument,
              fmt::format("{}: unknown format. Name a file that ends with .safetensors, .h5 or .hdf5", in_quotes(path)),
              {.path = path});
}

/// Converts a file; the new one appears complete or not at all. Leftovers of a killed conversion to the same file on
/// this host are removed. Each thread uses memory for a piece of some MiB. Returns the report.
std::string convert(const ConvertArguments& arguments, const std::stop_token& stop) {
  const bool is_state = is_state_name(arguments.out);
  const std::optional<int> zstd_level = parse_compression(arguments.compress);
  if (!is_state && zstd_level)
    throw Error(ErrorKind::invalid_argument,
                "--compress: safetensors files are not compressed. Write a state file (.h5) instead");
  check_paths(arguments);
  Source source = open_source(arguments.in, {.thirdparty = arguments.foreign});
  narrow(source, arguments.filter);
  const Omissions& omissions = source.tensors->omissions();
  if (!arguments.skips_unreadable)
    refuse_lost(omissions, "converting", arguments.in, "Pass --skip-unreadable to convert the other items");
  std::uint64_t bytes = 0;
  for (const TensorEntry& entry : source.entries()) bytes += entry.bytes;

  const auto begin = std::chrono::steady_clock::now();
  os::remove_dead_partials(arguments.out);
  const ProgressCallback bar = progress_bar();
  ProgressCounter progress(bar, bytes, stop);
  if (is_state)
    write_state(source, arguments.out, zstd_level, progress);
  else
    write_safetensors(source, arguments.out, progress);
  std::error_code error;
  const std::uint64_t file_bytes = fs::file_size(arguments.out, error);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (arguments.json) {
    const auto message_of = [](const SourceIssue& issue) { return issue.message; };
    return inspect::json_report(Config::object({{"path", arguments.out},
                                                {"tensors", source.entries().size()},
                                                {"bytes", bytes},
                                                {"file_bytes", file_bytes},
                                                {"seconds", seconds},
                                                {"notes", inspect::list_of(source.issues, message_of)},
                                                {"left_out", inspect::omissions_tree(omissions)}}));
  }
  std::string text;
  for (const SourceIssue& issue : source.issues) text += fmt::format("note: {}\n", escaped(issue.message));
  for (const Omission& omission : omissions)
    text += fmt::format("left out: {}: {}\n", inspect::printable(omission.name), escaped(omission.reason));
  return text + fmt::format("{}, {}, in a file of {}: {:.2f} s\n", counted(source.entries().size(), "tensor"),
                            inspect::human_bytes(bytes), inspect::human_bytes(file_bytes), seconds);
}

}  // namespace

void add_convert_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("convert", "Convert a file to a state file or to safetensors");
  auto arguments = std::make_shared<ConvertArguments>();
  command->add_option("in", arguments->in, "A safetensors, state or other HDF5 file, or a third-party checkpoint")
      ->required()
      ->type_name("IN");
  command->add_option("out", arguments->out, "File to create: .safetensors, or .h5 for a state file")
      ->required()
      ->type_name("OUT");
  command->add_option("--compress", arguments->compress, "State files: none, zstd or zstd:LEVEL")
      ->capture_default_str()
      ->type_name(compress_type);
  add_name_options(*command, arguments->filter.select, arguments->filter.exclude);
  command->add_option("--key", arguments->foreign.key, key_help)->type_name("KEY");
  command->add_flag("--skip-unreadable", arguments->skips_unreadable,
                    "Leave out items that cannot be read, and list them; otherwise such a file is refused");
  command->add_flag("--force", arguments->force, "Replace an existing file (never a link, a device or a pipe)");
  add_json_flag(*command, arguments->json);
  command->footer(
      "Names, dtypes, shapes and bits do not change. The metadata of a safetensors file becomes the config of the "
      "state\n"
      "file, and the reverse conversion restores it. The new file appears complete or not at all.\n\n"
      "Examples:\n  muster convert model.safetensors model.h5 --compress zstd\n"
      "  muster convert state.h5 state.safetensors");
  command->callback([arguments] {
    print_done(interruptible([&](const std::stop_token& stop) { return convert(*arguments, stop); }));
  });
}

}  // namespace muster::tools
