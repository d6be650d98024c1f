// SPDX-License-Identifier: Apache-2.0
#include "muster/log.hpp"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <utility>

#include "src/base/escaped.hpp"
#include "src/base/fork_mutex.hpp"

namespace muster {
namespace {

LogLevel lowest_of_environment() {
  const char* text = std::getenv("MUSTER_LOG");  // NOLINT(concurrency-mt-unsafe): read only
  if (text == nullptr) return LogLevel::warning;
  for (const LogLevel level : {LogLevel::debug, LogLevel::info, LogLevel::warning, LogLevel::error})
    if (to_string(level) == text) return level;
  return LogLevel::warning;
}

struct Sink {
  ForkMutex mutex;
  LogHook hook;
  std::atomic<LogLevel> lowest{lowest_of_environment()};
};

Sink& sink() {
  static auto* the_sink = new Sink;  // destructors of other statics may still log
  return *the_sink;
}

}  // namespace

std::string_view to_string(LogLevel level) noexcept {
  constexpr std::array<std::string_view, 4> names = {"debug", "info", "warning", "error"};
  const auto number = static_cast<std::size_t>(level);
  return number < names.size() ? names[number] : "unknown";
}

void set_log_hook(LogHook hook, LogLevel lowest) {
  Sink& target = sink();
  const std::lock_guard lock(target.mutex);
  target.lowest = hook ? lowest : lowest_of_environment();
  target.hook = std::move(hook);
}

bool log_enabled(LogLevel level) noexcept {
  return level >= sink().lowest.load(std::memory_order_relaxed);
}

void log(LogLevel level, std::string_view message) noexcept {
  if (!log_enabled(level)) return;
  try {
    Sink& target = sink();
    // In a forked child another thread may have been changing the hook during the fork. The message is then written to
    // standard error.
    if (const auto lock = target.mutex.lock_unless_abandoned()) {
      if (target.hook) {
        target.hook(level, message);
        return;
      }
    }
    // One write per line, because the ranks of a job share standard error.
    const std::string line = "muster: " + std::string(to_string(level)) + ": " + escaped(message) + "\n";
    std::fwrite(line.data(), 1, line.size(), stderr);
  } catch (...) {  // NOLINT(bugprone-empty-catch): a failed log must not end the work
  }
}

}  // namespace muster
