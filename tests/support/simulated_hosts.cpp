// SPDX-License-Identifier: Apache-2.0
#include "tests/support/simulated_hosts.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>

#include "src/group/progress.hpp"
#include "src/group/rank_table.hpp"

namespace muster::test {

using multihost::any_rank;
using multihost::PendingTransfer;

struct SimulatedNetwork::Receive {
  int from = any_rank;
  int tag = 0;
  std::span<std::byte> place = {};
  bool is_over = false;

  [[nodiscard]] bool matches(const Message& message) const noexcept {
    return message.tag == tag && (from == any_rank || message.from == from);
  }
};

/// A send that completes when the receiver has taken the message.
class SimulatedNetwork::SendOperation final : public multihost::TransferOperation {
 public:
  explicit SendOperation(std::shared_ptr<const bool> is_taken) : is_taken_(std::move(is_taken)) {}
  bool test() override { return *is_taken_; }
  void abandon() noexcept override {}
  [[nodiscard]] bool borrows() const noexcept override { return false; }

 private:
  std::shared_ptr<const bool> is_taken_;
};

class SimulatedNetwork::ReceiveOperation final : public multihost::TransferOperation {
 public:
  ReceiveOperation(std::shared_ptr<SimulatedNetwork> network, int rank, Receive receive)
      : network_(std::move(network)), rank_(rank), receive_(receive) {
    End& end = network_->end(rank_);
    const auto found =
        std::ranges::find_if(end.unmatched, [&](const Message& message) { return receive_.matches(message); });
    if (found == end.unmatched.end()) {
      end.receives.push_back(&receive_);
      return;
    }
    std::ranges::copy(found->bytes, receive_.place.begin());
    receive_.is_over = true;
    network_->take(*found);
    end.unmatched.erase(found);
  }
  ~ReceiveOperation() override { drop(); }
  ReceiveOperation& operator=(ReceiveOperation&&) = delete;
  bool test() override { return receive_.is_over; }
  bool cancel() noexcept override { return drop(); }
  void abandon() noexcept override { drop(); }
  [[nodiscard]] bool borrows() const noexcept override { return false; }

 private:
  bool drop() noexcept { return !receive_.is_over && std::erase(network_->end(rank_).receives, &receive_) != 0; }

  std::shared_ptr<SimulatedNetwork> network_;
  int rank_;
  Receive receive_;
};

class SimulatedNetwork::Arrived final : public multihost::ArrivedMessage {
 public:
  Arrived(SimulatedNetwork& network, Messages message) : network_(network), message_(std::move(message)) {}
  ~Arrived() override { network_.take(message_.front()); }
  Arrived& operator=(Arrived&&) = delete;
  [[nodiscard]] int from() const noexcept override { return message_.front().from; }
  [[nodiscard]] int tag() const noexcept override { return message_.front().tag; }
  [[nodiscard]] std::size_t bytes() const override { return message_.front().bytes.size(); }
  PendingTransfer receive(std::span<std::byte> place, std::shared_ptr<const void>) override {
    std::ranges::copy(message_.front().bytes, place.begin());
    return {};
  }

 private:
  SimulatedNetwork& network_;
  Messages message_;  // one message: a list, so that it moves here without a copy
};

class SimulatedNetwork::Barrier final : public multihost::TransferOperation {
 public:
  explicit Barrier(SimulatedNetwork& network) : network_(network), number_(network.passed_) {
    if (++network_.entered_ < network_.size()) return;
    network_.entered_ = 0;
    ++network_.passed_;
    network_.told_ = std::move(network_.telling_);
    for (int rank = 0; rank < network_.size(); ++rank) network_.wake_(rank);
  }
  bool test() override { return network_.passed_ > number_; }
  void abandon() noexcept override {}
  [[nodiscard]] bool borrows() const noexcept override { return false; }

 private:
  SimulatedNetwork& network_;
  std::uint64_t number_;
};

class SimulatedTransport final : public multihost::Transport {
 public:
  SimulatedTransport(std::shared_ptr<SimulatedNetwork> network, int rank)
      : Transport(rank, network->size()), network_(std::move(network)) {}

  // The route between hosts is chosen by the kind of the group.
  [[nodiscard]] std::string_view kind() const noexcept override { return "tcp"; }
  [[nodiscard]] std::string_view name() const noexcept override { return "the simulated network"; }
  [[nodiscard]] int most_tag() const override { return INT32_MAX; }
  PendingTransfer send(int to, int tag, std::span<const std::byte> bytes, std::shared_ptr<const void>,
                       multihost::SendEnd finished) override {
    std::shared_ptr<bool> is_taken;
    PendingTransfer pending;
    if (finished == multihost::SendEnd::taken) {
      is_taken = std::make_shared<bool>(false);
      pending = PendingTransfer(std::make_shared<SimulatedNetwork::SendOperation>(is_taken));
    }
    network_->deliver(to, {rank(), tag, {bytes.begin(), bytes.end()}, std::move(is_taken)});
    return pending;
  }
  PendingTransfer receive(int from, int tag, std::span<std::byte> bytes, std::shared_ptr<const void>) override {
    return PendingTransfer(std::make_shared<SimulatedNetwork::ReceiveOperation>(
        network_, rank(), SimulatedNetwork::Receive{.from = from, .tag = tag, .place = bytes}));
  }
  std::unique_ptr<multihost::ArrivedMessage> find(int from, int tag) override {
    const SimulatedNetwork::Receive wanted{.from = from, .tag = tag};
    return take_first([&](const auto& message) { return wanted.matches(message); });
  }
  std::unique_ptr<multihost::ArrivedMessage> find_any() override {
    return take_first([](const auto& message) { return message.tag >= multihost::first_tag; });
  }
  PendingTransfer barrier() override { return PendingTransfer(std::make_shared<SimulatedNetwork::Barrier>(*network_)); }
  std::vector<std::byte> tell_all(std::span<const std::byte> mine, std::chrono::milliseconds timeout) override {
    network_->telling_.resize(mine.size() * static_cast<std::size_t>(size()));
    std::byte* const place = network_->telling_.data() + mine.size() * static_cast<std::size_t>(rank());
    std::ranges::copy(mine, place);
    // The card of a rank (meet()): all ranks of this process would be found to be on one host.
    if (mine.size() == sizeof(multihost::RankMetadata))
      reinterpret_cast<multihost::RankMetadata*>(place)->has_obstacle = 1;
    barrier().wait(timeout, "the simulated ranks did not meet in time");
    return network_->told_;
  }
  // A stream would use a thread otherwise.
  [[nodiscard]] bool is_for_all_threads() const noexcept override { return false; }
  [[nodiscard]] bool may_call() const noexcept override { return Fibers::running() != nullptr; }
  [[nodiscard]] Error ended() const override { return {ErrorKind::unsupported, "the simulated network has ended"}; }
  bool close() noexcept override { return true; }
  [[nodiscard]] bool can_be_dropped() const noexcept override { return true; }

 private:
  template <class Matches>
  std::unique_ptr<multihost::ArrivedMessage> take_first(const Matches& matches) {
    SimulatedNetwork::Messages& all = network_->end(rank()).unmatched;
    const auto found = std::ranges::find_if(all, matches);
    if (found == all.end()) return nullptr;
    SimulatedNetwork::Messages one;
    one.splice(one.begin(), all, found);
    return std::make_unique<SimulatedNetwork::Arrived>(*network_, std::move(one));
  }

  std::shared_ptr<SimulatedNetwork> network_;
};

SimulatedNetwork::SimulatedNetwork(int size, std::function<void(int)> wake)
    : ends_(static_cast<std::size_t>(size)), wake_(std::move(wake)) {}

std::shared_ptr<multihost::Transport> SimulatedNetwork::transport(int rank) {
  return std::make_shared<SimulatedTransport>(shared_from_this(), rank);
}

void SimulatedNetwork::reset_counts() {
  for (End& end : ends_) end.traffic = {};
}

void SimulatedNetwork::deliver(int to, Message message) {
  End& there = end(to);
  Traffic& sender = end(message.from).traffic;
  ++sender.sent_messages;
  sender.sent_bytes += message.bytes.size();
  sender.peers.insert(to);
  ++there.traffic.received_messages;
  there.traffic.received_bytes += message.bytes.size();
  there.traffic.peers.insert(message.from);
  wake_(to);
  const auto found = std::ranges::find_if(there.receives, [&](const Receive* one) { return one->matches(message); });
  if (found == there.receives.end()) {
    there.unmatched.push_back(std::move(message));
    return;
  }
  std::ranges::copy(message.bytes, (*found)->place.begin());
  (*found)->is_over = true;
  there.receives.erase(found);
  take(message);
}

void SimulatedNetwork::take(const Message& message) {
  if (!message.is_taken) return;
  *message.is_taken = true;
  wake_(message.from);
}

SimulatedHosts::SimulatedHosts(int hosts)
    : fibers_(hosts),
      network_(std::make_shared<SimulatedNetwork>(hosts, [this](int rank) { fibers_.wake(rank); })),
      ranks_(static_cast<std::size_t>(hosts)) {
  std::vector<int> keys(ranks_.size());
  std::iota(keys.begin(), keys.end(), 0);
  hosts_ = std::make_shared<multihost::Hosts>(keys, 0);
  std::vector<RankInfo> infos;
  for (const int rank : keys) infos.push_back({rank, fmt::format("machine-{:05}.cluster", rank), 1000 + rank});
  multihost::HostsMembership members;
  members.ranks = group::RankTable::make(std::move(infos));
  members.hosts = hosts_;
  fibers_.enters = [this](int rank) { switch_to(rank); };
  fibers_.leaves = [this](int rank) {
    group::RankProgress::exchange_groups(ranks_[static_cast<std::size_t>(rank)].groups);
  };
  fibers_.run([&](int rank) {
    constexpr std::chrono::seconds timeout(60);
    Rank& own = ranks_[static_cast<std::size_t>(rank)];
    multihost::HostsMembership mine = members;
    mine.local = single_group();
    mine.local->set_timeout(timeout);
    own.context = std::make_shared<multihost::Context>(network_->transport(rank), timeout);
    own.context->introduce(mine);
    own.group = std::make_shared<multihost::HostsGroup>(own.context, 0, std::move(mine), rank, timeout);
  });
}

SimulatedHosts::~SimulatedHosts() {
  end();
}

void SimulatedHosts::switch_to(int rank) {
  // All ranks share this table. In a process of its own, each rank would have a copy with its own host.
  hosts_->mine = rank;
  group::RankProgress::exchange_groups(ranks_[static_cast<std::size_t>(rank)].groups);
}

void SimulatedHosts::run(const Body& body) {
  fibers_.run([&](int rank) { body(*ranks_[static_cast<std::size_t>(rank)].group); });
}

void SimulatedHosts::end() {
  fibers_.run([&](int rank) {
    Rank& own = ranks_[static_cast<std::size_t>(rank)];
    own.group.reset();
    if (!own.context) return;
    for (own.context->advance(); !own.context->has_ended(); own.context->advance()) {
      own.context->give_up_if_late();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    own.context.reset();
  });
}

}  // namespace muster::test
