// SPDX-License-Identifier: Apache-2.0
#pragma once
// Another program that gets one open file and gives bytes back: for work that may crash, hang or be taken over.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::os {

/// The descriptors that the program finds: the file, and a socket to whoever started it. Standard input and output are
/// /dev/null, and so is standard error unless a sanitizer wants to say something.
inline constexpr int subprocess_input = 3;
inline constexpr int subprocess_socket = 4;

struct SubprocessLimits {
  /// Of CPU time: a busy machine or a slow server is not the program's fault.
  std::chrono::milliseconds deadline{2000};
  /// Of time on the clock; where it is shorter than the deadline, that.
  std::chrono::milliseconds longest{0};
  /// Of run_subprocess: what it may say.
  std::uint64_t output_bytes = std::uint64_t{16} << 20;
};

enum class SubprocessEnd : std::uint8_t {
  exited,     ///< `status` is what it returned
  signalled,  ///< `status` is the signal
  timed_out,  ///< killed when its time was over
  too_much,   ///< killed when it said more than it may
  unknown,    ///< the host program takes all its children's ends, or ignores them
};

struct SubprocessResult {
  std::vector<std::byte> output;  ///< whatever the end was
  SubprocessEnd end = SubprocessEnd::unknown;
  int status = 0;
  std::chrono::microseconds wall{};
  std::uint64_t peak_bytes = 0;  ///< of resident memory; the kernel counts this process's own at the start in
};

/// A program that answers questions. Used by one thread at a time; killed when this ends.
class Subprocess {
 public:
  /// Starts `command[0]` (a path) with nothing of this process's environment but what names libraries and sanitizers'
  /// options, no descriptors but those above, no signal blocked or ignored. Safe in a process with threads. Throws
  /// Error(unsupported) if the program is not there or is not a program, Error(io) if no socket or process can be
  /// had. Faults: "spawn", "socketpair".
  Subprocess(const std::vector<std::string>& command, const Fd& input);
  Subprocess& operator=(Subprocess&&) = delete;
  ~Subprocess();
  /// What it does from now on may take so long.
  void begin(const SubprocessLimits& limits);
  /// A question that the socket's buffer has room for. One that has ended is noticed by receive().
  void send(std::span<const std::byte> question) noexcept;
  /// Waits for something to read. Less than the whole target, or 0: it has closed its end, or its time is over.
  std::size_t receive(std::span<std::byte> target);
  /// Its time is over.
  void stop() noexcept;
  /// Waits for its end until its time is over, then kills it. No output.
  SubprocessResult finish();

 private:
  struct Running;
  std::unique_ptr<Running> running_;
};

/// A program that speaks and ends: all that it says, and how it ended. Throws as Subprocess.
SubprocessResult run_subprocess(const std::vector<std::string>& command, const Fd& input,
                                const SubprocessLimits& limits);

}  // namespace muster::os
