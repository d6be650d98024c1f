// SPDX-License-Identifier: Apache-2.0
#pragma once
// LocalChannel: descriptors between the ranks of one host, over Unix sockets that are connected when they are first
// needed. One direction a connection, so that a rank that has died after sending can still be heard.

#include <functional>
#include <string>
#include <vector>

#include "src/os/unix_socket.hpp"
#include "src/sync/descriptor_channel.hpp"

namespace muster::sync {

class LocalChannel final : public DescriptorChannel {
 public:
  /// Waits for `peer` until done(), with sleeps; throws where that cannot be.
  using Wait = std::function<void(int peer, const std::function<bool()>& done, const std::function<void()>& sleep,
                                  const WaitOptions& options)>;

  LocalChannel(int rank, os::Fd listener, std::vector<std::string> addresses, SyncGroup::Nonce secret, Wait wait);
  void send(int to, std::span<const std::byte> note, int descriptor, const WaitOptions& options) override;
  Received receive(int from, const WaitOptions& options) override;

  /// For another channel of the same address; this one hears of nobody new.
  os::Fd take_listener() noexcept { return std::move(listener_); }

  /// A socket name that nobody else has.
  static std::string fresh_address();

 private:
  bool accept_waiting();
  bool try_receive(int from, os::Packet& packet);

  int rank_;
  os::Fd listener_;
  std::vector<std::string> addresses_;
  SyncGroup::Nonce secret_;
  Wait wait_;
  std::vector<os::Fd> outgoing_;
  std::vector<os::Fd> incoming_;
  std::vector<os::Fd> strangers_;  // accepted, not yet introduced
};

}  // namespace muster::sync
