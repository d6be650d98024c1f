// SPDX-License-Identifier: Apache-2.0
#include "tools/progress_bar.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <string>

#include "src/inspect/printable.hpp"

namespace muster::tools {
namespace {

constexpr int width = 30;

std::string time_text(double seconds) {
  const auto whole = std::lround(seconds);
  return whole < 60 ? fmt::format("{} s", whole) : fmt::format("{} min {:02} s", whole / 60, whole % 60);
}

void draw(const Progress& progress) {
  if (progress.bytes >= progress.total_bytes) {
    std::fputs("\r\x1b[K", stderr);
    return;
  }
  const double part = static_cast<double>(progress.bytes) / static_cast<double>(progress.total_bytes);
  const double rate = progress.seconds > 0 ? static_cast<double>(progress.bytes) / progress.seconds : 0;
  const int filled = static_cast<int>(part * width);
  std::string line =
      fmt::format("\r\x1b[K[{}{}] {:3.0f} %  {} of {}", std::string(static_cast<std::size_t>(filled), '#'),
                  std::string(static_cast<std::size_t>(width - filled), '.'), part * 100,
                  inspect::human_bytes(progress.bytes), inspect::human_bytes(progress.total_bytes));
  if (rate > 0)
    line += fmt::format("  {}/s  {} left", inspect::human_bytes(static_cast<std::uint64_t>(rate)),
                        time_text(static_cast<double>(progress.total_bytes - progress.bytes) / rate));
  std::fputs(line.c_str(), stderr);
}

}  // namespace

ProgressCallback progress_bar() {
  if (::isatty(STDERR_FILENO) == 0) return {};
  return [last = -1.0](const Progress& progress) mutable {
    if (progress.bytes < progress.total_bytes && progress.seconds - last < 0.1) return;
    last = progress.seconds;
    draw(progress);
  };
}

}  // namespace muster::tools
