// SPDX-License-Identifier: Apache-2.0
#include "tools/forecast.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "src/base/escaped.hpp"
#include "src/inspect/reports.hpp"

namespace muster::tools {

namespace fs = std::filesystem;

Forecast forecast_of(std::uint64_t bytes, const WindowShape& windows, int processes, Writers writers,
                     const std::string& out) {
  // A window is not larger than the whole output.
  const std::uint64_t piece = std::min(windows.bytes, bytes);
  Forecast forecast{bytes, piece * windows.pieces(processes, writers)};
  if (out.empty()) return forecast;
  std::error_code error;
  // "new/" and "new/." are normalised to "new".
  forecast.place = fs::is_directory(out, error)
                       ? out
                       : (fs::absolute(out) / "").lexically_normal().parent_path().parent_path().string();
  const fs::space_info space = fs::space(forecast.place, error);
  if (!error) forecast.free = space.available;
  return forecast;
}

std::string line_of(const Forecast& forecast) {
  std::string line = fmt::format("would write {}", inspect::human_bytes(forecast.bytes));
  if (forecast.memory != 0)
    line += fmt::format(" and use {} of memory for buffers", inspect::human_bytes(forecast.memory));
  if (forecast.place.empty()) return line + "\n";
  if (!forecast.free) return line + fmt::format("; the directory {} does not exist\n", in_quotes(forecast.place));
  return line + fmt::format("; {} free in {}{}\n", inspect::human_bytes(*forecast.free), in_quotes(forecast.place),
                            *forecast.free < forecast.bytes ? ": not enough" : "");
}

Config tree_of(const Forecast& forecast) {
  return Config::object({{"bytes", forecast.bytes},
                         {"memory", forecast.memory},
                         {"free", forecast.free ? Config(*forecast.free) : Config()}});
}

}  // namespace muster::tools
