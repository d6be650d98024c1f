// SPDX-License-Identifier: Apache-2.0
#include "src/sync/local_channel.hpp"

#include <cstring>
#include <optional>
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
                           Wait wait)
    : rank_(rank),
      listener_(std::move(listener)),
      addresses_(std::move(addresses)),
      secret_(secret),
      wait_(std::move(wait)),
      outgoing_(addresses_.size()),
      incoming_(addresses_.size()) {}

std::string LocalChannel::fresh_address() {
  return "muster-rank-" + os::random_hex(12);
}

void LocalChannel::send(int to, std::span<const std::byte> note, int descriptor, const WaitOptions& options) {
  os::Fd& connection = outgoing_[static_cast<std::size_t>(to)];
  const auto a_while = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
  const auto send_all = [&](const os::Fd& socket, std::span<const std::byte> bytes, int fd) {
    os::SocketStatus status = os::SocketStatus::again;
    // Asked again once it is sent: not a second time.
    const auto is_sent = [&] {
      if (status != os::SocketStatus::done) status = os::send_packet(socket, bytes, fd);
      return status == os::SocketStatus::done;
    };
    const auto until_room = [&] {
      // Where the other side has ended, the group's own look says so in its words, within a slice or two.
      if (status == os::SocketStatus::closed)
        a_while();
      else
        os::wait_writable(socket, Watchdog::slice);
    };
    wait_(to, is_sent, until_room, options);
  };
  if (!connection) {
    std::optional<os::Fd> socket;
    const auto is_connected = [&] {
      if (!socket) socket = os::connect_abstract(addresses_[static_cast<std::size_t>(to)]);
      return socket.has_value();
    };
    wait_(to, is_connected, a_while, options);
    const Introduction introduction{secret_, rank_};
    send_all(*socket, std::as_bytes(std::span(&introduction, 1)), -1);
    connection = std::move(*socket);
  }
  send_all(connection, note, descriptor);
}

bool LocalChannel::accept_waiting() {
  bool any = false;
  for (;;) {
    // Room first: who is taken in and dropped again has no other way to this rank.
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
  os::Packet packet;
  bool has_come = false;
  const auto is_there = [&] { return has_come = has_come || try_receive(from, packet); };
  const auto until_one = [&] {
    // Until the sender is known, it may be at the door or among those who have not introduced themselves yet.
    std::vector<int> sockets;
    if (const os::Fd& connection = incoming_[static_cast<std::size_t>(from)]) {
      sockets.push_back(connection.get());
    } else {
      sockets.push_back(listener_.get());
      for (const os::Fd& stranger : strangers_) sockets.push_back(stranger.get());
    }
    os::wait_any_readable(sockets, std::chrono::milliseconds(10));
  };
  wait_(from, is_there, until_one, options);
  return {std::move(packet.bytes), std::move(packet.descriptor)};
}

}  // namespace muster::sync
