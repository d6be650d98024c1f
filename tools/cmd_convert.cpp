// SPDX-License-Identifier: Apache-2.0
// muster convert: safetensors to state file and back.

#include <fmt/core.h>

#include <memory>
#include <string>

#include "src/inspect/convert.hpp"
#include "src/inspect/output.hpp"
#include "tools/commands.hpp"
#include "tools/interruption.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

struct ConvertArguments {
  std::string in;
  std::string out;
  std::string compress = "none";
  bool force = false;
};

}  // namespace

void add_convert_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("convert", "Make a state file from a safetensors file, or the other way");
  auto arguments = std::make_shared<ConvertArguments>();
  command->add_option("in", arguments->in, "A safetensors, state or any other HDF5 file")
      ->required()
      ->type_name("FILE");
  command->add_option("out", arguments->out, "The file to make: .safetensors, or .h5 for a state file")
      ->required()
      ->type_name("FILE");
  command->add_option("--compress", arguments->compress, "none, zstd or zstd:LEVEL; for state files")
      ->capture_default_str()
      ->type_name(compress_type);
  command->add_flag("--force", arguments->force, "Replace a file that is there (never a link, a device or a pipe)");
  command->footer(
      "Names, dtypes, shapes and bits stay. What stands in the metadata of a safetensors file becomes the config of a\n"
      "state file and comes back as it was (docs/inspecting.md). The new file appears whole or not at all.\n\n"
      "Examples:\n  muster convert model.safetensors model.h5 --compress zstd\n"
      "  muster convert state.h5 state.safetensors");
  command->callback([arguments, &status] {
    const inspect::ConvertReport report = interruptible([&](const std::stop_token& stop) {
      return inspect::convert(
          arguments->in, arguments->out,
          {inspect::parse_compression(arguments->compress), arguments->force, progress_bar(), stop});
    });
    print_done(fmt::format("{}, {}, in a file of {}: {:.2f} s\n", inspect::counted(report.tensors, "tensor"),
                           inspect::human_bytes(report.bytes), inspect::human_bytes(report.stored_bytes),
                           report.seconds));
    status = 0;
  });
}

}  // namespace muster::tools
