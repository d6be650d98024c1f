// SPDX-License-Identifier: Apache-2.0
#pragma once
// What standard output is, and the options that several commands share.

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <string_view>

#include "src/inspect/tensor_source.hpp"
#include "src/inspect/text_table.hpp"

namespace muster::tools {

/// Columns, characters and colours of standard output. A pipe has none of them: names stay whole for whoever searches
/// them. NO_COLOR and TERM=dumb switch colours off.
inspect::OutputStyle output_style();

/// Writes to standard output; main() finds out whether it arrived.
void print(std::string_view text);

/// --plan, --rank, --generation and --job: what of a path is meant.
void add_source_options(CLI::App& command, inspect::SourceOptions& options);

/// --ascii.
void add_ascii_option(CLI::App& command, inspect::OutputStyle& style);

}  // namespace muster::tools
