// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ranks' output on its way through the launcher: to a terminal or wherever the launcher's goes, and into files.

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

/// What is kept of a stream's end.
inline constexpr std::size_t longest_tail = 2U << 10U;

/// A line for each rank at the end of a terminal, drawn anew in place: what the rank has said last.
class LiveLines {
 public:
  /// `names`: what each line begins with. As many lines are drawn as the terminal has room for.
  LiveLines(int terminal, std::vector<std::string> names);
  void set(std::size_t row, std::string_view words);
  /// Draws what has changed, at most ten times a second unless it is `now`. Returns errno, 0 if there is none.
  int draw(bool now);

 private:
  int terminal_;
  std::vector<std::string> names_;
  std::vector<std::string> words_;
  std::size_t drawn_ = 0;  // lines that are there
  bool has_changed_ = true;
  std::chrono::steady_clock::time_point last_{};
};

/// Where one stream of a rank goes.
struct OutputTarget {
  /// Whole lines go to this descriptor, with `prefix` before them; -1: to none.
  int descriptor = -1;
  std::string prefix = {};
  os::Fd log = {};                      ///< all bytes go there as they are
  std::optional<std::size_t> row = {};  ///< of the live lines
};

/// Reads pipes in a thread of its own, so that a reader of the launcher's output who is slow does not keep it from
/// seeing ranks fail. A line is written by one call, at most 1 MiB of it; a last line without an end gets one.
class OutputPump {
 public:
  /// Ends as finish(0).
  ~OutputPump();
  OutputPump& operator=(OutputPump&&) = delete;

  /// Before start(): the streams have live lines.
  void draw_lines(int terminal, std::vector<std::string> names) { live_.emplace(terminal, std::move(names)); }
  /// Before start(). Returns the number of the stream.
  std::size_t add(os::Fd source, OutputTarget target);
  /// Throws Error(io) if no thread or descriptor can be had.
  void start();
  /// Waits until all sources have ended, at most `longest` without any coming, and stops. Returns the errno of the
  /// first write that failed, 0 if none did. A pipe that nobody reads any more is no failure: its sources are closed.
  int finish(std::chrono::milliseconds longest);
  /// After finish(): the end of what has come.
  [[nodiscard]] const std::string& tail(std::size_t stream) const { return streams_[stream].tail; }

 private:
  struct Stream {
    os::Fd source;
    OutputTarget target;
    std::string line;  ///< the prefix and what has come of the line
    std::string tail;
  };
  void run();
  void pass_on(Stream& stream);
  void write(Stream& stream);
  void note(int failure);

  std::vector<Stream> streams_;
  std::optional<LiveLines> live_;
  os::Fd stop_;
  int failure_ = 0;  // of the thread, as long as it runs
  os::Thread thread_;
};

}  // namespace muster::launch
