// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs another program that receives one open file and returns bytes, for work that may crash, hang or be compromised.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::os {

/// The descriptors of the program: the file, and a socket to the process that started it. Standard input and output are
/// /dev/null. Standard error is also /dev/null, except with sanitizers, so that their reports appear.
inline constexpr int subprocess_input = 3;
inline constexpr int subprocess_socket = 4;

struct SubprocessLimits {
  /// Limit of CPU time. A busy machine or a slow server does not count against the program.
  std::chrono::milliseconds deadline{2000};
  /// Limit of elapsed time; if it is shorter than `deadline`, `deadline` applies.
  std::chrono::milliseconds longest{0};
  /// For run_subprocess: the maximum size of the output.
  std::uint64_t output_bytes = std::uint64_t{16} << 20;
};

enum class SubprocessEnd : std::uint8_t {
  exited,     ///< `status` is the exit status
  signalled,  ///< `status` is the signal
  timed_out,  ///< killed at the time limit
  too_much,   ///< killed because its output was too large
  unknown,    ///< the host program reaps all children, or ignores SIGCHLD
};

struct SubprocessResult {
  std::vector<std::byte> output;  ///< filled for every kind of end
  SubprocessEnd end = SubprocessEnd::unknown;
  int status = 0;
  std::chrono::microseconds wall{};
  /// Peak resident memory; the kernel includes the memory of this process at the start.
  std::uint64_t peak_bytes = 0;
};

/// A program that answers questions. Used by one thread at a time. The destructor kills it.
class Subprocess {
 public:
  /// Starts `command[0]` (a path). The program gets only the descriptors above, and only environment variables for
  /// library paths and sanitizer options. No signal is blocked or ignored. Safe in a process with threads. Throws
  /// Error(unsupported) if the program is missing or not executable, and Error(io) if no socket or process can be
  /// created. Faults: "spawn", "socketpair".
  Subprocess(const std::vector<std::string>& command, const Fd& input);
  Subprocess& operator=(Subprocess&&) = delete;
  ~Subprocess();
  /// Starts a new time limit.
  void begin(const SubprocessLimits& limits);
  /// Sends a question, which must fit into the socket's buffer. If the program has ended, receive() detects it.
  void send(std::span<const std::byte> question) noexcept;
  /// Waits until `target` is full. Returns fewer bytes, or 0, if the program has closed its end or its time is over.
  std::size_t receive(std::span<std::byte> target);
  /// Ends the program's time limit now.
  void stop() noexcept;
  /// Waits for the end of the program until its time limit, then kills it. The result has no output.
  SubprocessResult finish();

 private:
  struct Running;
  std::unique_ptr<Running> running_;
};

/// Runs a program to its end and returns its output and how it ended. Throws as Subprocess.
SubprocessResult run_subprocess(const std::vector<std::string>& command, const Fd& input,
                                const SubprocessLimits& limits);

}  // namespace muster::os
