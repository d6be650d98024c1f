// SPDX-License-Identifier: Apache-2.0
#pragma once
// What --dry-run says that making files would take.

#include <cstdint>
#include <optional>
#include <string>

#include "src/checkpoint/export_job.hpp"

namespace muster::tools {

struct Forecast {
  std::uint64_t bytes = 0;
  std::uint64_t memory = 0;                ///< for bytes on their way; 0: nobody knows
  std::string place = {};                  ///< whose file system they go to; empty: nobody has said it
  std::optional<std::uint64_t> free = {};  ///< none: the place is not there
};

/// Of `bytes` that so many processes write with these windows into `out`, which may be empty.
Forecast forecast_of(std::uint64_t bytes, const WindowShape& windows, int processes, Writers writers,
                     const std::string& out);
/// A line.
std::string words_of(const Forecast& forecast);

}  // namespace muster::tools
