// SPDX-License-Identifier: Apache-2.0
// muster fingerprint: prints a CRC-64 of each tensor of a model, or compares them with those in a file.

#include <memory>
#include <string>

#include "src/base/escaped.hpp"
#include "src/checkpoint/assembly/base_model.hpp"
#include "src/checkpoint/fingerprint.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/inspect/reports.hpp"
#include "tools/commands.hpp"
#include "tools/terminal.hpp"

namespace muster::tools {
namespace {

constexpr std::uint64_t longest_fingerprint = std::uint64_t{1} << 30;

struct FingerprintArguments {
  SourceOptions source;
  std::string check;
  bool json = false;
};

/// Reads a fingerprint without the tensors that the request does not select.
Fingerprint read_fingerprint(const std::string& file, const SourceOptions& request) {
  Fingerprint fingerprint = with_file("reading the fingerprint", file,
                                      [&] { return parse_fingerprint(read_text(file, longest_fingerprint)); });
  const muster::TensorSelection selection(request);
  std::erase_if(fingerprint.tensors, [&](const TensorFingerprint& tensor) { return !selection.has(tensor.name); });
  return fingerprint;
}

}  // namespace

void add_fingerprint_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("fingerprint", "Print a fingerprint of a model, or compare with one");
  auto arguments = std::make_shared<FingerprintArguments>();
  SourceOptions& source = arguments->source;
  command->add_option("path", source.path, source_help)->required()->type_name(source_type);
  command
      ->add_option("--check", arguments->check, "Compare with the fingerprint in this file, and name each difference")
      ->type_name("FILE");
  add_name_options(*command, source.select, source.exclude);
  add_cast_options(*command, source.dtype, source.cast_all);
  add_source_options(*command, source);
  add_json_flag(*command, arguments->json);
  command->footer(
      "Prints one line per tensor, sorted by name, with its CRC-64/XZ, dtype and shape, and a hash of these lines. "
      "The\n"
      "output is the same for each layout over ranks, number of files and order of tensors. So two machines can "
      "compare\n"
      "their weights without copying them. A fingerprint detects accidents, not attacks. With --select and --exclude,\n"
      "--check leaves out the other lines of FILE, too.\n"
      "Exit status: 0 the same, or printed; 1 different; 2 cannot be read.\n\n"
      "Examples:\n  muster fingerprint model/ > model.fingerprint\n"
      "  muster fingerprint shards/ --plan auto --check model.fingerprint\n"
      "  muster fingerprint trained/ --dtype BF16 --check served.fingerprint");
  command->callback([arguments, &status] {
    const SourceOptions& request = arguments->source;
    if (arguments->check.empty()) {
      const Fingerprint found = fingerprint_of(request, progress_bar(), {});
      return print(arguments->json ? inspect::json_report(inspect::fingerprint_tree(request.path, found))
                                   : found.text());
    }
    // Read first, so that a mistake in its name is found before all tensors are read.
    const Fingerprint expected = read_fingerprint(arguments->check, request);
    const Fingerprint found = fingerprint_of(request, progress_bar(), {});
    print(arguments->json
              ? inspect::json_report(inspect::fingerprint_check_tree(request.path, arguments->check, expected, found))
              : inspect::fingerprint_check_text(expected, found));
    status = expected == found ? 0 : 1;
  });
}

}  // namespace muster::tools
