// SPDX-License-Identifier: Apache-2.0
#include "src/tcp/transport.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "muster/log.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/multihost/hosts.hpp"
#include "src/os/clock.hpp"
#include "src/os/fd.hpp"
#include "src/os/process.hpp"
#include "src/tcp/listener.hpp"

namespace muster::tcp {

/// Holds the lock. After it is released, destroys the keepers of finished operations, whose destructors may run code of
/// the program.
class TcpTransport::LockHold {
 public:
  explicit LockHold(TcpTransport& transport) : transport_(transport), lock_(transport.mutex_) {}
  ~LockHold() {
    const std::vector<std::shared_ptr<const void>> over = std::exchange(transport_.shared_.over, {});
    lock_.unlock();
  }
  LockHold& operator=(LockHold&&) = delete;

 private:
  TcpTransport& transport_;
  std::unique_lock<ForkMutex> lock_;
};

namespace {

[[noreturn]] void throw_lost(const Error& why) {
  throw Error(why.kind() == ErrorKind::out_of_space ? why.kind() : ErrorKind::io, fmt::format("TCP: {}", why.what()),
              why.details());
}

bool is_over(const OperationState& progress) {
  if (progress.is_over && progress.failure) throw_lost(*progress.failure);
  return progress.is_over;
}

}  // namespace

class TcpTransport::Send final : public multihost::TransferOperation {
 public:
  Send(TcpTransport& transport, std::shared_ptr<OutgoingFrame> message)
      : transport_(transport), message_(std::move(message)) {}

  bool test() override {
    const LockHold hold(transport_);
    if (!is_over(message_->progress)) transport_.poll();
    return is_over(message_->progress);
  }
  /// The send continues. Zeros replace the bytes that belonged to the caller. Only ranks whose call has failed as well
  /// receive them.
  void abandon() noexcept override {
    const LockHold hold(transport_);
    message_->is_given_up = message_->is_borrowed;
  }
  [[nodiscard]] bool borrows() const noexcept override {
    const LockHold hold(transport_);
    return message_->is_borrowed && !message_->progress.is_over;
  }

 private:
  TcpTransport& transport_;
  std::shared_ptr<OutgoingFrame> message_;
};

class TcpTransport::Receive final : public multihost::TransferOperation {
 public:
  Receive(TcpTransport& transport, int from, std::shared_ptr<ReceiveOperation> receive)
      : transport_(transport), from_(from), receive_(std::move(receive)) {}

  bool test() override {
    const LockHold hold(transport_);
    if (!is_over(receive_->progress)) transport_.poll();
    return is_over(receive_->progress);
  }
  bool cancel() noexcept override {
    abandon();
    return true;
  }
  /// If the message has begun to arrive, it is read completely into memory that is kept for it.
  void abandon() noexcept override {
    const LockHold hold(transport_);
    if (from_ == multihost::any_rank)
      std::erase(transport_.shared_.from_anybody, receive_);
    else
      transport_.peer(from_).take_back(receive_);
    receive_->is_from_anybody = false;
  }
  [[nodiscard]] bool borrows() const noexcept override { return false; }

 private:
  TcpTransport& transport_;
  int from_;
  std::shared_ptr<ReceiveOperation> receive_;
};

class TcpTransport::TakenOut final : public multihost::ArrivedMessage {
 public:
  TakenOut(TcpTransport& transport, int from, std::shared_ptr<UnmatchedMessage> arrival)
      : transport_(transport), from_(from), arrival_(std::move(arrival)) {}
  ~TakenOut() override {
    const LockHold hold(transport_);
    if (!is_received_) transport_.peer(from_).drop(arrival_);
  }
  TakenOut& operator=(TakenOut&&) = delete;

  [[nodiscard]] int from() const noexcept override { return from_; }
  [[nodiscard]] int tag() const noexcept override { return arrival_->tag; }
  [[nodiscard]] std::size_t bytes() const override { return arrival_->bytes; }
  multihost::PendingTransfer receive(std::span<std::byte> place, std::shared_ptr<const void> keeper) override {
    const auto receive = std::make_shared<ReceiveOperation>(ReceiveOperation{.tag = arrival_->tag, .place = place});
    receive->progress.keeper = std::move(keeper);
    const LockHold hold(transport_);
    transport_.peer(from_).receive(arrival_, receive);
    is_received_ = true;
    return multihost::PendingTransfer(std::make_shared<Receive>(transport_, from_, receive));
  }

 private:
  TcpTransport& transport_;
  int from_;
  std::shared_ptr<UnmatchedMessage> arrival_;
  bool is_received_ = false;
};

Endpoint Addresses::endpoint_of(const RankAddress& contact) const {
  const asio::ip::address_v6 address(contact.address);
  if (address.is_unspecified()) return {root, contact.port};
  if (address.is_v4_mapped()) return {asio::ip::make_address_v4(asio::ip::v4_mapped, address), contact.port};
  return {address, contact.port};
}

TcpTransport::TcpTransport(int rank, Addresses addresses, std::unique_ptr<asio::io_context> io, Acceptor acceptor)
    : Transport(rank, static_cast<int>(addresses.of_ranks.size())),
      io_(std::move(io)),
      addresses_(std::move(addresses)) {
  constexpr std::uint64_t other_files = 256;
  os::allow_open_files(open_files_for(static_cast<std::uint64_t>(size())) + other_files);
  shared_.connect = [this](Peer& to) { return connect(to); };
  shared_.lost = [this](Peer& lost) {
    if (!is_closing_ && !os::is_own_shortage(lost.error()->os_error())) lost_.push_back(lost.rank());
  };
  shared_.receive_from_anybody = [this](const auto& receive) { receive_from_anybody(receive); };
  listener_ = std::make_unique<Listener>(
      *io_, std::move(acceptor), addresses_.token, rank, size(), [this](int from, Socket socket) {
        auto connection = std::make_unique<Connection>(peer(from), std::move(socket), MessageKind::forwards, true);
        if (!peer(from).accept(std::move(connection)))
          log(LogLevel::info, fmt::format("TCP: rank {} closes a second connection of rank {}", this->rank(), from));
      });
  begin_forkable();
}

multihost::Transport::Contact TcpTransport::contact() const {
  multihost::Transport::Contact bytes{};
  static_assert(sizeof(RankAddress) <= sizeof bytes);
  std::memcpy(bytes.data(), &addresses_.own, sizeof(RankAddress));
  return bytes;
}

void TcpTransport::learn(std::vector<multihost::Transport::Contact> contacts) {
  const LockHold hold(*this);
  for (std::size_t rank = 0; rank < contacts.size(); ++rank) {
    RankAddress address;
    std::memcpy(&address, contacts[rank].data(), sizeof address);
    addresses_.of_ranks[rank] = addresses_.endpoint_of(address);
  }
}

std::vector<int> TcpTransport::neighbours_in_tree(int rank, int size) {
  const multihost::HostTree tree{size};
  std::vector<int> ranks = tree.children(rank);
  ranks.insert(ranks.begin(), rank);
  if (rank != 0) ranks.insert(ranks.begin(), tree.parent(rank));
  return ranks;
}

Peer& TcpTransport::peer(int rank) {
  std::unique_ptr<Peer>& peer = peers_[rank];
  if (peer) return *peer;
  peer = std::make_unique<Peer>(shared_, rank);
  // A rank that connects only now must also learn that this rank leaves in order.
  if (is_closing_) peer->say_bye();
  return *peer;
}

TcpTransport::~TcpTransport() {
  end_forkable();
}

std::unique_ptr<Connection> TcpTransport::connect(Peer& to) {
  const Endpoint& address = addresses_.of_ranks[static_cast<std::size_t>(to.rank())];
  auto connection = std::make_unique<Connection>(to, new_socket(*io_, address), MessageKind::backwards, false);
  connection->connect(address, {.from = rank(), .to = to.rank(), .token = addresses_.token});
  return connection;
}

void TcpTransport::poll() {
  if (io_->stopped()) io_->restart();
  io_->poll();
}

multihost::PendingTransfer TcpTransport::send(int to, int tag, std::span<const std::byte> bytes,
                                              std::shared_ptr<const void> keeper, multihost::SendEnd finished) {
  const auto message =
      std::make_shared<OutgoingFrame>(tag, bytes, std::move(keeper), finished == multihost::SendEnd::taken);
  const LockHold hold(*this);
  if (const auto& failure = peer(to).error()) throw_lost(*failure);
  peer(to).send(message);
  return multihost::PendingTransfer(std::make_shared<Send>(*this, message));
}

bool TcpTransport::has_left(int to) {
  const LockHold hold(*this);
  return peer(to).has_nothing_to_send();
}

multihost::PendingTransfer TcpTransport::receive(int from, int tag, std::span<std::byte> bytes,
                                                 std::shared_ptr<const void> keeper) {
  const bool is_from_anybody = from == multihost::any_rank;
  const auto receive = std::make_shared<ReceiveOperation>(
      ReceiveOperation{.tag = tag, .place = bytes, .is_from_anybody = is_from_anybody});
  receive->progress.keeper = std::move(keeper);
  const LockHold hold(*this);
  if (is_from_anybody)
    receive_from_anybody(receive);
  else
    peer(from).receive(receive);
  return multihost::PendingTransfer(std::make_shared<Receive>(*this, from, receive));
}

void TcpTransport::receive_from_anybody(const std::shared_ptr<ReceiveOperation>& receive) {
  for (const auto& [rank, one] : peers_)
    if (const std::shared_ptr<UnmatchedMessage> arrival = one->find(receive->tag))
      return one->receive(arrival, receive);
  shared_.from_anybody.push_back(receive);
}

std::unique_ptr<multihost::ArrivedMessage> TcpTransport::find(int from, int tag) {
  const LockHold hold(*this);
  if (from == multihost::any_rank) return find_of_any(tag);
  std::shared_ptr<UnmatchedMessage> arrival = peer(from).find(tag);
  if (!arrival) {
    poll();
    arrival = peer(from).find(tag);
  }
  if (arrival) return std::make_unique<TakenOut>(*this, from, std::move(arrival));
  if (const auto& failure = peer(from).error()) throw_lost(*failure);
  return nullptr;
}

std::unique_ptr<multihost::ArrivedMessage> TcpTransport::find_any() {
  const LockHold hold(*this);
  return find_of_any(std::nullopt);
}

std::unique_ptr<multihost::ArrivedMessage> TcpTransport::find_of_any(std::optional<int> tag) {
  poll();
  if (shared_.arrivals == 0) return nullptr;
  for (const auto& [rank, one] : peers_)
    if (auto arrival = one->find(tag)) return std::make_unique<TakenOut>(*this, one->rank(), std::move(arrival));
  return nullptr;
}

namespace {

// Collective operations use a tree of messages, so that no rank must reach all others.
enum class TreeTag : int { barrier = 1, tell = 2 };
static_assert(static_cast<int>(TreeTag::tell) < multihost::first_tag);

/// The nodes of the tree are ranks instead of hosts.
multihost::HostTree tree_of(const multihost::Transport& transport) {
  return {transport.size()};
}

class TreeBarrier final : public multihost::TransferOperation {
 public:
  explicit TreeBarrier(multihost::Transport& transport)
      : transport_(transport), parent_(tree_of(transport).parent(transport.rank())) {
    for (const int child : tree_of(transport).children(transport.rank())) from_children_.push_back(receive(child));
  }

  bool test() override {
    std::erase_if(from_children_, [](multihost::PendingTransfer& one) { return one.test(); });
    if (!from_children_.empty()) return false;
    if (parent_ >= 0 && !std::exchange(has_told_, true)) {
      from_parent_ = receive(parent_);
      send(parent_);
    }
    if (!from_parent_.test()) return false;
    if (!std::exchange(is_through_, true))
      for (const int child : tree_of(transport_).children(transport_.rank())) send(child);
    std::erase_if(sends_, [](multihost::PendingTransfer& one) { return one.test(); });
    return sends_.empty();
  }
  void abandon() noexcept override {}
  [[nodiscard]] bool borrows() const noexcept override { return false; }

 private:
  multihost::PendingTransfer receive(int from) {
    return transport_.receive(from, static_cast<int>(TreeTag::barrier), {}, nullptr);
  }
  void send(int to) {
    sends_.push_back(transport_.send(to, static_cast<int>(TreeTag::barrier), {}, nullptr, multihost::SendEnd::sent));
  }

  multihost::Transport& transport_;
  int parent_;
  bool has_told_ = false;
  bool is_through_ = false;
  std::vector<multihost::PendingTransfer> from_children_;
  multihost::PendingTransfer from_parent_;
  std::vector<multihost::PendingTransfer> sends_;
};

}  // namespace

multihost::PendingTransfer TcpTransport::barrier() {
  return multihost::PendingTransfer(std::make_shared<TreeBarrier>(*this));
}

std::vector<std::byte> TcpTransport::tell_all(std::span<const std::byte> mine, std::chrono::milliseconds timeout) {
  const multihost::HostTree tree = tree_of(*this);
  const int self = rank();
  const auto begin = os::Clock::now();
  const auto wait = [&](multihost::PendingTransfer pending, int on) {
    // A rank waits longer than the ranks above it in the tree, which name the missing rank first.
    const auto grace = multihost::wait_step * (tree.depth(self) + 1) + std::chrono::milliseconds(self == 0 ? 0 : 1500);
    const auto until = begin + timeout + grace;
    while (!pending.test()) {
      watch();
      if (os::Clock::now() > until)
        throw Error(
            ErrorKind::timeout,
            fmt::format("TCP: rank {} waited {:.1f} s for rank {} during the rendezvous. Check that rank {} is running "
                        "and that its host can be reached from this one, or raise MUSTER_TIMEOUT (seconds)",
                        self, std::chrono::duration<double>(timeout).count(), on, on),
            {.rank = on});
      // With many ranks per core, ranks that poll would take the processor from those that have something to do.
      const LockHold hold(*this);
      io_->run_one_for(std::chrono::milliseconds(20));
    }
  };
  const auto receive_from = [&](int from, std::size_t bytes) {
    auto memory = std::make_shared<std::vector<std::byte>>(bytes);
    wait(receive(from, static_cast<int>(TreeTag::tell), *memory, memory), from);
    return memory;
  };
  const auto send_to = [&](int to, const std::shared_ptr<std::vector<std::byte>>& bytes) {
    wait(send(to, static_cast<int>(TreeTag::tell), *bytes, bytes, multihost::SendEnd::sent), to);
  };
  // The data of the subtrees arrives in the order of the tree.
  const auto below = std::make_shared<std::vector<std::byte>>(mine.begin(), mine.end());
  for (const int child : tree.children(self)) {
    const auto theirs = receive_from(child, mine.size() * tree.with_all_below(child).size());
    below->insert(below->end(), theirs->begin(), theirs->end());
  }
  auto all = std::make_shared<std::vector<std::byte>>(mine.size() * static_cast<std::size_t>(size()));
  if (self == 0) {
    const std::byte* next = below->data();
    for (const int rank : tree.with_all_below(0)) {
      std::copy_n(next, mine.size(), all->data() + static_cast<std::size_t>(rank) * mine.size());
      next += mine.size();
    }
  } else {
    send_to(tree.parent(self), below);
    all = receive_from(tree.parent(self), all->size());
  }
  for (const int child : tree.children(self)) send_to(child, all);
  return std::move(*all);
}

bool TcpTransport::has_sent_all() {
  const LockHold hold(*this);
  poll();
  return std::ranges::all_of(peers_, [](const auto& entry) { return entry.second->has_nothing_to_send(); });
}

int TcpTransport::next_lost() noexcept {
  const LockHold hold(*this);
  if (lost_.empty()) return multihost::any_rank;
  const int lost = lost_.front();
  lost_.pop_front();
  return lost;
}

void TcpTransport::throw_if_resting() const {
  const std::lock_guard lock(mutex_);
  listener_->throw_if_blocked();
}

Error TcpTransport::ended() const {
  return Error(ErrorKind::invalid_argument, "TCP: the process is ending, so its groups cannot be used",
               {.rank = rank()});
}

bool TcpTransport::close() noexcept {
  const LockHold hold(*this);
  try {
    if (!std::exchange(is_closing_, true))
      for (const auto& [rank, one] : peers_) one->say_bye();
    poll();
    if (!std::ranges::all_of(peers_, [](const auto& entry) { return entry.second->is_through(); })) return false;
  } catch (const std::exception& error) {
    log(LogLevel::warning, fmt::format("TCP: closing the connections of rank {}: {}", rank(), error.what()));
  }
  listener_->close();
  for (const auto& [rank, one] : peers_) one->close();
  return true;
}

void TcpTransport::in_child() noexcept {
  listener_->give_up_sockets();
  for (const auto& [rank, one] : peers_) one->give_up_sockets();
  mutex_.unlock();
}

}  // namespace muster::tcp
