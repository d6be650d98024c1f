// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the reader of foreign files does to itself before it looks at one: a process that is taken over by a file can
// read that file, say what it likes in the report, and nothing else.

#include <cstdint>

namespace muster::hdf5 {

struct FenceOptions {
  std::uint64_t cpu_seconds = 3;
  std::uint64_t address_bytes = std::uint64_t{48} << 20;  ///< beyond what the program has by now: 64 MiB with it
  int input = 3;                                          ///< the one file that may be read, at offsets
  int socket = 4;                                         ///< to whoever started this program
};

/// Closes everything but the two descriptors and the standard ones. Not to be undone.
void drop_inheritance(const FenceOptions& options) noexcept;

/// 1. No core dumps, no more descriptors, no file contents, no processes, a limit of CPU time and of address space
///    (not under sanitizers, which need terabytes of it).
/// 2. No new privileges, not to be looked into by other processes of this user.
/// 3. A filter of system calls: memory, time, pread of the input, the socket, the end. What libhdf5 might ask
///    for in good faith is EPERM; what only an attacker wants (exec, fork, ptrace, sockets) is the end of the process.
/// FenceFlags of what is in force.
std::uint8_t raise_fence(const FenceOptions& options) noexcept;

}  // namespace muster::hdf5
