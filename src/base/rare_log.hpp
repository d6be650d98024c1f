// SPDX-License-Identifier: Apache-2.0
#pragma once
// Limits the rate of log messages that processes outside of the job can cause.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "muster/log.hpp"

namespace muster {

/// Logs at most one message per second. The next message states how many were left out. Not thread-safe.
class RareLog {
 public:
  explicit RareLog(LogLevel level) noexcept : level_(level) {}

  void operator()(std::string_view message) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point now = Clock::now();
    if (last_ && now - *last_ < std::chrono::seconds(1)) {
      ++left_out_;
      return;
    }
    last_ = now;
    std::string text(message);
    if (left_out_ != 0) text += " (" + std::to_string(left_out_) + " similar messages were left out)";
    left_out_ = 0;
    log(level_, text);
  }

 private:
  LogLevel level_;
  std::optional<std::chrono::steady_clock::time_point> last_;
  std::uint64_t left_out_ = 0;
};

}  // namespace muster
