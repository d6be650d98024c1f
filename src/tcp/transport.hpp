// SPDX-License-Identifier: Apache-2.0
#pragma once
// The TCP transport. Every rank listens. A rank connects to another one when it first has a message for it
// (connection.hpp). There is no thread: the calls poll, and bytes move in these calls and in the buffers of the kernel.

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/multihost/transport.hpp"
#include "src/tcp/peer.hpp"

namespace muster::tcp {

class Listener;

/// The address and the port of a rank, as rank 0 sees them. An unspecified address is that of rank 0's host.
struct RankAddress {
  std::array<std::uint8_t, 16> address{};  // IPv6
  std::uint16_t port = 0;
};

/// The addresses at which the ranks listen, as one rank uses them, and the token of the job.
struct Addresses {
  std::vector<Endpoint> of_ranks;  ///< at first only those of the ranks next to this one in the tree of ranks
  Token token{};
  RankAddress own{};
  asio::ip::address root{};  ///< the address at which this rank has reached rank 0

  [[nodiscard]] Endpoint endpoint_of(const RankAddress& contact) const;
};

class TcpTransport final : public multihost::Transport, private Forkable {
 public:
  static constexpr std::string_view kind_name = "tcp";

  /// `acceptor` listens at the address of this rank, and was made with `io`.
  TcpTransport(int rank, Addresses addresses, std::unique_ptr<asio::io_context> io, Acceptor acceptor);
  ~TcpTransport() override;

  [[nodiscard]] std::string_view kind() const noexcept override { return kind_name; }
  [[nodiscard]] std::string_view name() const noexcept override { return "TCP"; }
  [[nodiscard]] std::uint64_t open_files_for(std::uint64_t ranks) const noexcept override {
    // Two ranks have one connection in each direction.
    return 2 * ranks;
  }
  [[nodiscard]] multihost::Transport::Contact contact() const override;
  void learn(std::vector<multihost::Transport::Contact> contacts) override;
  /// Returns the ranks with which tell_all() and barrier() exchange messages, and the rank itself, in ascending order.
  static std::vector<int> neighbours_in_tree(int rank, int size);
  [[nodiscard]] int most_tag() const override { return INT32_MAX; }

  multihost::PendingTransfer send(int to, int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> keeper,
                                  multihost::SendEnd finished) override;
  [[nodiscard]] bool has_left(int to) override;
  multihost::PendingTransfer receive(int from, int tag, std::span<std::byte> bytes,
                                     std::shared_ptr<const void> keeper) override;
  std::unique_ptr<multihost::ArrivedMessage> find(int from, int tag) override;
  std::unique_ptr<multihost::ArrivedMessage> find_any() override;
  multihost::PendingTransfer barrier() override;
  std::vector<std::byte> tell_all(std::span<const std::byte> mine, std::chrono::milliseconds timeout) override;
  void watch() override {
    if (watch_) watch_();
  }
  void set_watch(std::function<void()> watch) { watch_ = std::move(watch); }
  int next_lost() noexcept override;
  /// Polls once. Returns whether the kernel has accepted everything that this rank has sent.
  bool has_sent_all();

  void throw_if_resting() const override;
  [[nodiscard]] Error ended() const override;
  /// Sends `bye` to all ranks and waits until all ranks have sent it. If a socket is closed while received data is
  /// unread, the kernel may discard the data that it has sent.
  bool close() noexcept override;
  [[nodiscard]] bool can_be_dropped() const noexcept override { return true; }

  class LockHold;
  class Send;
  class Receive;
  class TakenOut;

 private:
  /// Makes the peer at first use.
  Peer& peer(int rank);
  std::unique_ptr<Connection> connect(Peer& peer);
  void receive_from_anybody(const std::shared_ptr<ReceiveOperation>& receive);
  void poll();
  std::unique_ptr<multihost::ArrivedMessage> find_of_any(std::optional<int> tag);
  void before_fork() override { mutex_.lock(); }
  void after_fork() override { mutex_.unlock(); }
  void in_child() noexcept override;

  mutable ForkMutex mutex_;
  std::unique_ptr<asio::io_context> io_;
  Addresses addresses_;
  Peer::PeersState shared_;
  std::map<int, std::unique_ptr<Peer>> peers_;  // by rank; only those with which this rank has communicated
  std::unique_ptr<Listener> listener_;
  std::deque<int> lost_;
  bool is_closing_ = false;
  std::function<void()> watch_;
};

}  // namespace muster::tcp
