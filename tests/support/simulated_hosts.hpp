// SPDX-License-Identifier: Apache-2.0
#pragma once
// Simulated hosts: all ranks of a job in one thread of one process, each on a host of its own. They run the real code
// of groups and gathers over a transport in memory, which counts their messages. Each rank is a fiber.
//
// The ranks share one table of the ranks and hosts, which each real process has for itself. So 32,768 ranks fit into
// one process.

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "src/multihost/group.hpp"
#include "tests/support/fibers.hpp"
#include "tests/support/uncounted.hpp"

namespace muster::test {

/// What one rank has sent and received. A message counts when it is sent.
struct Traffic {
  std::uint64_t sent_messages = 0;
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_messages = 0;
  std::uint64_t received_bytes = 0;
  std::set<int, std::less<>, Uncounted<int>> peers;  ///< the ranks with which it exchanged a message

  [[nodiscard]] std::uint64_t messages() const noexcept { return sent_messages + received_messages; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return sent_bytes + received_bytes; }
};

/// The network between the simulated hosts. Messages arrive at once. The rounds of barrier() and tell_all() are not
/// counted: each transport has its own.
class SimulatedNetwork : public std::enable_shared_from_this<SimulatedNetwork> {
 public:
  /// `wake` ends the wait of a rank.
  SimulatedNetwork(int size, std::function<void(int rank)> wake);
  std::shared_ptr<multihost::Transport> transport(int rank);
  [[nodiscard]] int size() const noexcept { return static_cast<int>(ends_.size()); }
  [[nodiscard]] const Traffic& of(int rank) const { return ends_[static_cast<std::size_t>(rank)].traffic; }
  void reset_counts();

 private:
  friend class SimulatedTransport;
  using Bytes = std::vector<std::byte, Uncounted<std::byte>>;
  struct Message {
    int from;
    int tag;
    Bytes bytes;
    std::shared_ptr<bool> is_taken;
  };
  using Messages = std::list<Message, Uncounted<Message>>;
  struct Receive;
  class SendOperation;
  class ReceiveOperation;
  class Arrived;
  class Barrier;
  struct End {
    Messages unmatched;
    std::list<Receive*, Uncounted<Receive*>> receives;
    Traffic traffic;
  };

  End& end(int rank) { return ends_[static_cast<std::size_t>(rank)]; }
  void deliver(int to, Message message);
  /// The receiver has begun to receive the message.
  void take(const Message& message);

  std::vector<End> ends_;
  std::function<void(int)> wake_;
  int entered_ = 0;           // ranks that have entered the current barrier or tell_all
  std::uint64_t passed_ = 0;  // barriers and calls of tell_all that have ended
  std::vector<std::byte> telling_;
  std::vector<std::byte> told_;
};

/// A job of simulated hosts.
class SimulatedHosts {
 public:
  using Body = std::function<void(multihost::HostsGroup& group)>;
  explicit SimulatedHosts(int hosts);
  ~SimulatedHosts();
  SimulatedHosts& operator=(SimulatedHosts&&) = delete;

  /// Runs body(group) on all ranks at the same time.
  void run(const Body& body);
  /// Destroys the groups of all ranks, and ends their contexts.
  void end();
  [[nodiscard]] int size() const noexcept { return network_->size(); }
  [[nodiscard]] SimulatedNetwork& network() noexcept { return *network_; }
  [[nodiscard]] Fibers& fibers() noexcept { return fibers_; }

 private:
  struct Rank {
    std::shared_ptr<multihost::Context> context;
    std::shared_ptr<multihost::HostsGroup> group;
    std::vector<group::BaseGroup*> groups;  // its groups while it does not run (RankProgress)
  };
  void switch_to(int rank);

  Fibers fibers_;
  std::shared_ptr<SimulatedNetwork> network_;
  std::shared_ptr<multihost::Hosts> hosts_;
  std::vector<Rank> ranks_;
};

}  // namespace muster::test
