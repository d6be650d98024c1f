// SPDX-License-Identifier: Apache-2.0
#include "tools/progress_bar.hpp"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "src/inspect/printable.hpp"

namespace muster::tools {
namespace {

bool is_drawn = false;

std::string time_text(double seconds) {
  const auto whole = std::lround(seconds);
  return whole < 60 ? fmt::format("{} s", whole) : fmt::format("{} min {:02} s", whole / 60, whole % 60);
}

/// In one line of `columns`: a longer one would move the terminal on.
std::string line_of(const Progress& progress, std::size_t columns) {
  const double part = static_cast<double>(progress.bytes) / static_cast<double>(progress.total_bytes);
  const double rate = progress.seconds > 0 ? static_cast<double>(progress.bytes) / progress.seconds : 0;
  std::string words = fmt::format("{:3.0f} %  {} of {}", part * 100, inspect::human_bytes(progress.bytes),
                                  inspect::human_bytes(progress.total_bytes));
  if (rate > 0)
    words += fmt::format("  {}/s  {} left", inspect::human_bytes(static_cast<std::uint64_t>(rate)),
                         time_text(static_cast<double>(progress.total_bytes - progress.bytes) / rate));
  // The last column stays empty: terminals differ in what they do after it.
  constexpr std::size_t longest = 30;
  constexpr std::size_t shortest = 5;
  constexpr std::size_t around = 4;
  const std::size_t room = columns > words.size() + around ? std::min(columns - words.size() - around, longest) : 0;
  if (room < shortest) return words.substr(0, columns - 1);
  const auto filled = static_cast<std::size_t>(part * static_cast<double>(room));
  return fmt::format("[{}{}] {}", std::string(filled, '#'), std::string(room - filled, '.'), words);
}

void draw(const Progress& progress) {
  clear_progress_bar();
  if (progress.bytes >= progress.total_bytes) return;
  struct winsize size {};
  constexpr std::size_t usual = 80;
  const bool is_known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col != 0;
  std::fputs(line_of(progress, is_known ? size.ws_col : usual).c_str(), stderr);
  is_drawn = true;
}

}  // namespace

void clear_progress_bar() {
  if (is_drawn) std::fputs("\r\x1b[K", stderr);
  is_drawn = false;
}

ProgressCallback progress_bar() {
  if (::isatty(STDERR_FILENO) == 0) return {};
  return [last = -1.0](const Progress& progress) mutable {
    if (progress.bytes < progress.total_bytes && progress.seconds - last < 0.1) return;
    last = progress.seconds;
    draw(progress);
  };
}

}  // namespace muster::tools
