// SPDX-License-Identifier: Apache-2.0
#pragma once
// A log message that strangers can cause as often as they like.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "muster/log.hpp"

namespace muster {

/// Logs one message per second at most. The next one has the number of messages left out. One thread at a time.
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
