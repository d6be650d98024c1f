// SPDX-License-Identifier: Apache-2.0
#pragma once
// The resources that making files would take, for --dry-run.

#include <cstdint>
#include <optional>
#include <string>

#include "muster/config.hpp"
#include "src/checkpoint/assembly/export_job.hpp"

namespace muster::tools {

struct Forecast {
  std::uint64_t bytes = 0;
  std::uint64_t memory = 0;                ///< for buffers; 0: unknown
  std::string place = {};                  ///< a path on the file system of the output; empty: no output is given
  std::optional<std::uint64_t> free = {};  ///< nullopt: the place does not exist
};

/// Returns the forecast for `bytes` that this many processes write with these windows into `out`, which may be empty.
Forecast forecast_of(std::uint64_t bytes, const WindowShape& windows, int processes, Writers writers,
                     const std::string& out);
/// Returns the forecast as one line.
std::string line_of(const Forecast& forecast);
/// Returns {"bytes", "memory", "free"}.
Config tree_of(const Forecast& forecast);

}  // namespace muster::tools
