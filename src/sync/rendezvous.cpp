// SPDX-License-Identifier: Apache-2.0
#include "src/sync/rendezvous.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <cstring>
#include <thread>

#include "src/os/process.hpp"
#include "src/sync/interruption.hpp"
#include "src/sync/rendezvous_packets.hpp"
#include "src/sync/settings.hpp"

namespace muster::sync {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

}  // namespace

void send_until(const os::Fd& socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                Clock::time_point deadline, int to) {
  for (;;) {
    const os::SocketStatus status = os::send_packet(socket, bytes, descriptors);
    if (status == os::SocketStatus::done) return;
    if (status == os::SocketStatus::closed)
      throw Error(ErrorKind::peer_lost, fmt::format("rendezvous: rank {} died or hung up", to), {.rank = to});
    if (Clock::now() > deadline)
      throw Error(ErrorKind::timeout, fmt::format("rendezvous: rank {} does not take its messages", to), {.rank = to});
    // If it is descriptors under way that are too many, the socket itself has room.
    os::wait_writable(socket, milliseconds(20));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Hello own_hello(int rank, int size) {
  Hello hello;
  put_text(hello.version, version());
  hello.rank = rank;
  hello.size = size;
  hello.pid = os::process_id();
  put_text(hello.host, os::host_name());
  return hello;
}

namespace {

/// Descriptors that a rank of so many may need: pidfds, regions, sockets of the rendezvous.
std::uint64_t descriptors_of(int size) {
  return 3 * static_cast<std::uint64_t>(size) + 64;
}

/// The other ranks' side.
class Visitor {
 public:
  Visitor(const std::string& key, int rank, int size, Clock::time_point deadline, milliseconds timeout)
      : key_(key), rank_(rank), size_(size), deadline_(deadline), timeout_(timeout) {}

  Membership run() {
    const std::shared_ptr<Region> region = Region::own();
    connect();
    const os::Fd pidfd = os::own_pidfd();
    try {
      const std::array<int, descriptors_a_card> mine{pidfd.get(), region->memory()->get()};
      send_until(socket_, bytes_of(own_hello(rank_, size_)), mine, deadline_, 0);
    } catch (const Error& error) {
      // Hung up already: rank 0 may have left word why.
      if (error.kind() != ErrorKind::peer_lost) throw;
    }
    os::Packet packet = next("rank 0's answer");
    const auto answer = parse<Answer>(packet, "an answer");
    Membership membership;
    membership.rank = rank_;
    membership.nonce = answer.nonce;
    auto peers = std::make_shared<Peers>();
    if (packet.descriptors.size() != 1) throw Error(ErrorKind::corrupt, "rank 0 answered without the group's memory");
    peers->structure = std::make_shared<Region>(std::move(packet.descriptors.front()));
    membership.control = ControlBlock::open(*peers->structure, answer.control_place, size_);
    while (peers->ranks.size() < static_cast<std::size_t>(size_)) take_cards(*peers);
    membership.peers = std::move(peers);
    return membership;
  }

 private:
  void take_cards(Peers& peers) {
    os::Packet packet = next("the other ranks' cards");
    const std::size_t count = packet.bytes.size() / sizeof(Hello);
    if (count == 0 || packet.bytes.size() % sizeof(Hello) != 0 ||
        peers.ranks.size() + count > static_cast<std::size_t>(size_) ||
        packet.descriptors.size() != descriptors_a_card * count)
      throw Error(ErrorKind::version,
                  fmt::format("rendezvous: cards of {} bytes with {} descriptors cannot be: the ranks run different "
                              "builds",
                              packet.bytes.size(), packet.descriptors.size()));
    std::vector<Hello> cards(count);
    std::memcpy(static_cast<void*>(cards.data()), packet.bytes.data(), packet.bytes.size());
    for (std::size_t i = 0; i < count; ++i) {
      peers.ranks.push_back({cards[i].rank, get_text(cards[i].host), cards[i].pid});
      os::Fd* const descriptors = &packet.descriptors[descriptors_a_card * i];
      peers.pidfds.push_back(std::make_shared<const os::Fd>(std::move(descriptors[0])));
      peers.regions.push_back(std::make_shared<Region>(std::move(descriptors[1])));
    }
  }

  void connect() {
    const std::string name = meeting_name(key_);
    for (;;) {
      if (auto socket = os::connect_abstract(name)) {
        socket_ = std::move(*socket);
        return;
      }
      if (Clock::now() > deadline_) time_out("rank 0 did not open the rendezvous");
      check_interrupted("rendezvous");
      std::this_thread::sleep_for(milliseconds(2));
    }
  }

  [[noreturn]] void time_out(const std::string& what) const {
    throw Error(
        ErrorKind::timeout,
        fmt::format("rendezvous: {} within {:.1f} s (this is rank {}, host {}, pid {}): are all ranks started, on this "
                    "host, by this "
                    "user, with the same key?",
                    what, std::chrono::duration<double>(timeout_).count(), rank_, os::host_name(), os::process_id()),
        {.rank = 0});
  }

  os::Packet next(const char* what) {
    os::Packet packet;
    for (;;) {
      switch (os::receive_packet(socket_, largest_packet, packet)) {
        case os::SocketStatus::done:
          // A refusal can come at any point: another rank may have died meanwhile.
          if (packet.bytes.size() == sizeof(Answer)) {
            const auto answer = parse<Answer>(packet, "an answer");
            if (answer.kind == AnswerKind::refusal) throw answer.error.get();
          }
          return packet;
        case os::SocketStatus::closed:
          throw Error(ErrorKind::peer_lost, fmt::format("rendezvous: rank 0 ended before it sent {}", what),
                      {.rank = 0});
        case os::SocketStatus::again:
          break;
      }
      // Rank 0 itself gives up at its deadline and says who is missing: hear it out.
      if (Clock::now() > deadline_ + std::chrono::seconds(5)) time_out(std::string("rank 0 did not send ") + what);
      check_interrupted("rendezvous");
      os::wait_readable(socket_, milliseconds(50));
    }
  }

  const std::string& key_;
  int rank_;
  int size_;
  Clock::time_point deadline_;
  milliseconds timeout_;
  os::Fd socket_;
};

}  // namespace

std::string meeting_name(const std::string& key) {
  const XXH128_hash_t hash = XXH3_128bits(key.data(), key.size());
  return fmt::format("muster-{}-{:016x}{:016x}", os::user_id(), hash.high64, hash.low64);
}

}  // namespace muster::sync

namespace muster {

std::shared_ptr<SyncGroup> local_group(const LocalGroupOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    throw Error(ErrorKind::argument,
                fmt::format("local_group: rank {} in a group of {} ranks cannot be", options.rank, options.size));
  if (options.key.empty())
    throw Error(ErrorKind::argument, "local_group: the key is empty: any process could be meant");
  if (!options.numbers.empty() && options.numbers.size() != static_cast<std::size_t>(options.size))
    throw Error(ErrorKind::argument,
                fmt::format("local_group: {} numbers for a group of {} ranks", options.numbers.size(), options.size));
  const std::chrono::milliseconds timeout = sync::timeout_of(options.timeout, sync::default_timeout());
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  os::allow_open_files(sync::descriptors_of(options.size));
  sync::Membership membership = options.rank == 0
                                    ? sync::host_rendezvous(options.key, options.size, deadline, timeout)
                                    : sync::Visitor(options.key, options.rank, options.size, deadline, timeout).run();
  for (std::size_t i = 0; i < options.numbers.size(); ++i) membership.peers->ranks[i].rank = options.numbers[i];
  auto group = std::make_shared<sync::LocalGroup>(std::move(membership), timeout);
  group->barrier({.timeout = {}, .stop = {}, .phase = "rendezvous"});
  return group;
}

}  // namespace muster
