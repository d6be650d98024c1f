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
  /// Called between slices of a wait for `peer`; throws where it cannot end. `done` says that what was waited for is
  /// there.
  using Patience = std::function<void(int peer, const std::function<bool()>& done)>;
  /// Makes the patience of one wait.
  using PatienceFactory = std::function<Patience(const WaitOptions&)>;

  LocalChannel(int rank, os::Fd listener, std::vector<std::string> addresses, SyncGroup::Nonce secret,
               PatienceFactory patience);
  void send(int to, std::span<const std::byte> note, int descriptor, const WaitOptions& options) override;
  Received receive(int from, const WaitOptions& options) override;

  /// A socket name that nobody else has.
  static std::string fresh_address();

 private:
  bool accept_waiting();
  bool try_receive(int from, os::Packet& packet);

  int rank_;
  os::Fd listener_;
  std::vector<std::string> addresses_;
  SyncGroup::Nonce secret_;
  PatienceFactory patience_;
  std::vector<os::Fd> outgoing_;
  std::vector<os::Fd> incoming_;
  std::vector<os::Fd> strangers_;  // accepted, not yet introduced
};

}  // namespace muster::sync
