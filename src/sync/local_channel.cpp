// SPDX-License-Identifier: Apache-2.0
#include "src/sync/local_channel.hpp"

#include <cstring>
#include <thread>

#include "src/os/process.hpp"
#include "src/sync/watchdog.hpp"

namespace muster::sync {
namespace {

/// The first packet of a connection: only ranks of the group know the nonce.
struct Introduction {
  SyncGroup::Nonce secret;
  std::int32_t rank;
};

}  // namespace

LocalChannel::LocalChannel(int rank, os::Fd listener, std::vector<std::string> addresses, SyncGroup::Nonce secret,
                           PatienceFactory patience)
    : rank_(rank),
      listener_(std::move(listener)),
      addresses_(std::move(addresses)),
      secret_(secret),
      patience_(std::move(patience)),
      outgoing_(addresses_.size()),
      incoming_(addresses_.size()) {}

std::string LocalChannel::fresh_address() {
  return "muster-rank-" + os::random_hex(12);
}

void LocalChannel::send(int to, std::span<const std::byte> note, int descriptor, const WaitOptions& options) {
  os::Fd& known = outgoing_[static_cast<std::size_t>(to)];
  const Patience patience = patience_(options);
  const auto never = [] { return false; };
  auto send_all = [&](const os::Fd& connection, std::span<const std::byte> bytes, int fd) {
    for (;;) {
      const os::SocketStatus status = os::send_packet(connection, bytes, fd);
      if (status == os::SocketStatus::done) return;
      // Where the other side has ended, the group's own check says so in its words, within a slice or two.
      if (status == os::SocketStatus::closed)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      else
        os::wait_writable(connection, Watchdog::slice);
      patience(to, never);
    }
  };
  if (!known) {
    os::Fd connection;
    const std::string& address = addresses_[static_cast<std::size_t>(to)];
    for (;;) {
      if (auto socket = os::connect_abstract(address)) {
        connection = std::move(*socket);
        break;
      }
      patience(to, never);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const Introduction introduction{secret_, rank_};
    send_all(connection, std::as_bytes(std::span(&introduction, 1)), -1);
    known = std::move(connection);
  }
  send_all(known, note, descriptor);
}

bool LocalChannel::accept_waiting() {
  bool any = false;
  for (;;) {
    // Before a connection is taken: one that is dropped is lost for good.
    strangers_.reserve(strangers_.size() + 1);
    auto socket = os::accept_own(listener_);
    if (!socket) break;
    strangers_.push_back(std::move(*socket));
  }
  for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
    os::Packet packet;
    const os::SocketStatus status = os::receive_packet(*stranger, sizeof(Introduction), packet);
    if (status == os::SocketStatus::again) {
      ++stranger;
      continue;
    }
    Introduction introduction{};
    if (status == os::SocketStatus::done && packet.bytes.size() == sizeof introduction) {
      std::memcpy(&introduction, packet.bytes.data(), sizeof introduction);
      const auto rank = static_cast<std::size_t>(introduction.rank);
      if (introduction.secret == secret_ && introduction.rank >= 0 && rank < incoming_.size()) {
        incoming_[rank] = std::move(*stranger);
        any = true;
      }
    }
    stranger = strangers_.erase(stranger);
  }
  return any;
}

bool LocalChannel::try_receive(int from, os::Packet& packet) {
  const auto index = static_cast<std::size_t>(from);
  if (!incoming_[index]) accept_waiting();
  return incoming_[index] && os::receive_packet(incoming_[index], max_note, packet) == os::SocketStatus::done;
}

DescriptorChannel::Received LocalChannel::receive(int from, const WaitOptions& options) {
  const Patience patience = patience_(options);
  os::Packet packet;
  for (;;) {
    if (try_receive(from, packet)) break;
    // Until the sender is known, it may be at the door or among those who have not introduced themselves yet.
    std::vector<int> sockets;
    if (const os::Fd& connection = incoming_[static_cast<std::size_t>(from)]) {
      sockets.push_back(connection.get());
    } else {
      sockets.push_back(listener_.get());
      for (const os::Fd& stranger : strangers_) sockets.push_back(stranger.get());
    }
    os::wait_any_readable(sockets, std::chrono::milliseconds(10));
    bool arrived = false;
    patience(from, [&] { return arrived = try_receive(from, packet); });
    if (arrived) break;
  }
  return {std::move(packet.bytes), std::move(packet.descriptor)};
}

}  // namespace muster::sync
