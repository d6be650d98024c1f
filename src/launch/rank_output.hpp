// SPDX-License-Identifier: Apache-2.0
#pragma once
// Forwards the output of the ranks through the launcher: to a terminal or the launcher's standard streams, and into
// files.

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/os/fd.hpp"
#include "src/os/thread.hpp"

namespace muster::launch {

/// The number of bytes that are kept of the end of a stream.
inline constexpr std::size_t longest_tail = 2U << 10U;

/// Draws one line per rank at the bottom of a terminal, and redraws it in place. The line shows the last output of the
/// rank.
class LiveLines {
 public:
  /// `names` are the beginnings of the lines. As many lines are drawn as the terminal has space for.
  LiveLines(int terminal, std::vector<std::string> names);
  void set(std::size_t row, std::string_view words);
  /// Draws the changes, at most ten times per second unless `now` is set. Returns 0 or errno.
  int draw(bool now);

 private:
  int terminal_;
  std::vector<std::string> names_;
  std::vector<std::string> words_;
  std::size_t drawn_ = 0;  // the number of lines on the terminal
  bool has_changed_ = true;
  std::chrono::steady_clock::time_point last_{};
};

/// The destinations of one stream of a rank.
struct OutputTarget {
  /// Whole lines are written to this descriptor after `prefix`; -1 for none.
  int descriptor = -1;
  std::string prefix = {};
  os::Fd log = {};                      ///< receives all bytes unchanged
  std::optional<std::size_t> row = {};  ///< the index of the live line
};

/// Reads pipes in a separate thread. So a slow reader of the launcher's output does not delay the detection of failed
/// ranks. Each line is written by one call, up to 1 MiB. If the last line has no newline, one is added.
class OutputPump {
 public:
  /// Behaves as finish(0).
  ~OutputPump();
  OutputPump& operator=(OutputPump&&) = delete;

  /// Draws live lines for the streams. Called before start().
  void draw_lines(int terminal, std::vector<std::string> names) { live_.emplace(terminal, std::move(names)); }
  /// Adds a stream and returns its number. Called before start().
  std::size_t add(os::Fd source, OutputTarget target);
  /// Throws Error(io) if a thread or descriptor cannot be created.
  void start();
  /// Waits until all sources have ended, but at most `longest` without new data, and stops the thread. Returns the
  /// errno of the first failed write, or 0. A pipe without a reader does not count as a failure: its sources are
  /// closed.
  int finish(std::chrono::milliseconds longest);
  /// Returns the end of the data of a stream. Called after finish().
  [[nodiscard]] const std::string& tail(std::size_t stream) const { return streams_[stream].tail; }

 private:
  struct OutputStream {
    os::Fd source;
    OutputTarget target;
    std::string line;  ///< the prefix and the received part of the current line
    std::string tail;
  };
  void run();
  void pass_on(OutputStream& stream);
  void write(OutputStream& stream);
  void note(int failure);

  std::vector<OutputStream> streams_;
  std::optional<LiveLines> live_;
  os::Fd stop_;
  int failure_ = 0;  // used by the thread while it runs
  os::Thread thread_;
};

}  // namespace muster::launch
