// SPDX-License-Identifier: Apache-2.0
#pragma once
// DescriptorChannel: hands file descriptors (shared memory) from one rank to another that shares memory with it.

#include <cstddef>
#include <span>
#include <vector>

#include "muster/sync_group.hpp"
#include "src/os/fd.hpp"

namespace muster {

/// Used by the thread that uses the group. Waits have the deadline and the failures of the group's own.
class DescriptorChannel {
 public:
  /// The longest note, in bytes.
  static constexpr std::size_t max_note = 512;
  struct Received {
    std::vector<std::byte> note;
    os::Fd descriptor;  ///< none where the sender had none to give
  };

  virtual ~DescriptorChannel() = default;
  /// Hands over a note (not empty), and a descriptor where it is not negative. Does not wait for the receiver.
  virtual void send(int to, std::span<const std::byte> note, int descriptor, const WaitOptions& options) = 0;
  /// The oldest one from that rank.
  virtual Received receive(int from, const WaitOptions& options) = 0;
};

}  // namespace muster
