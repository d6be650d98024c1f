// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ranks' output on its way through the launcher: whole lines with the rank before them.

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::launch {

/// Reads pipes in a thread of its own, so that a reader of the launcher's output who is slow does not keep it from
/// seeing ranks fail. A line is written by one call, at most 1 MiB of it; a last line without an end gets one.
class LinePump {
 public:
  LinePump() = default;
  /// Ends as finish(0).
  ~LinePump();
  LinePump(const LinePump&) = delete;
  LinePump& operator=(const LinePump&) = delete;

  /// Before start(): what comes from `source` goes to the descriptor `target`, with `prefix` before each line.
  void add(os::Fd source, int target, std::string prefix);
  /// Throws Error(io) where no thread or descriptor can be had.
  void start();
  /// Waits until all sources have ended, at most `longest` without any coming, and stops. Returns the errno of the
  /// first write that failed, 0 if none did. A pipe that nobody reads any more is no failure: its sources are closed.
  int finish(std::chrono::milliseconds longest);

 private:
  struct Stream {
    os::Fd source;
    int target = 1;
    std::string line;  ///< the prefix and what has come of the line
    std::size_t prefix_size = 0;
  };
  void run();
  void pass_on(Stream& stream);
  void write(Stream& stream);

  std::vector<Stream> streams_;
  os::Fd stop_;
  int failure_ = 0;  // of the thread, as long as it runs
  std::thread thread_;
};

}  // namespace muster::launch
