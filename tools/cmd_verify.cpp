// SPDX-License-Identifier: Apache-2.0
// muster verify: whether a checkpoint, shards or a file are whole, and the checksums that tell it later.

#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>

#include "muster/verify.hpp"
#include "src/inspect/verify_output.hpp"
#include "tools/commands.hpp"
#include "tools/progress_bar.hpp"

namespace muster::tools {
namespace {

struct VerifyArguments {
  std::string path;
  bool headers_only = false;
  bool write_checksums = false;
  bool json = false;
};

int verify_path(const VerifyArguments& arguments) {
  if (arguments.write_checksums) {
    const std::uint64_t count = write_checksums(arguments.path, progress_bar());
    fmt::print("{} checksum{} written\n", count, count == 1 ? "" : "s");
    return 0;
  }
  const VerifyReport report =
      verify(arguments.path, {.checksums = !arguments.headers_only, .progress = progress_bar()});
  const std::string text = arguments.json ? inspect::verify_json(report) : inspect::verify_text(report);
  std::fwrite(text.data(), 1, text.size(), stdout);
  return report.is_good() ? 0 : 1;
}

}  // namespace

void add_verify_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("verify", "Find all that is wrong with a checkpoint, shards or a file");
  auto arguments = std::make_shared<VerifyArguments>();
  command->add_option("path", arguments->path, "A directory in HuggingFace's layout, one with shards, or a file")
      ->required()
      ->type_name("FILE|DIR");
  auto* headers =
      command->add_flag("--headers-only", arguments->headers_only, "Do not read tensors for their checksums");
  auto* write = command->add_flag("--write-checksums", arguments->write_checksums,
                                  "Make muster.checksums.json beside a checkpoint that is whole");
  auto* json = command->add_flag("--json", arguments->json, "JSON for programs");
  write->excludes(headers)->excludes(json);
  command->footer(
      "The index against the files, sizes and headers, numbers without holes, and all tensors against their checksums\n"
      "where there are some. Exit status: 0 good, 1 problems, 2 cannot be verified.\n\n"
      "Examples:\n  muster verify --write-checksums model/\n  muster verify model/ --json | jq -r '.problems[].words'");
  command->callback([arguments, &status] { status = verify_path(*arguments); });
}

}  // namespace muster::tools
