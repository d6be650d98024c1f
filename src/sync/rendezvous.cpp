// SPDX-License-Identifier: Apache-2.0
// Rendezvous: how the processes of one host that know a key become a group.
//
//  1. Every rank opens a pidfd of itself, and its region: the shared memory that the others may look at later.
//  2. Rank 0 listens on an abstract socket whose name is made of the key and the uid. The others connect to it, again
//     and again until the deadline, and say hello: version, rank, size, pid, host; pidfd and region go with it.
//  3. Rank 0 waits until all ranks have come, once each, of the same version and size. Else it tells everyone who has
//     come or still comes why not.
//  4. Rank 0 makes another region for what groups are made of, and the control block in it. It sends everyone a
//     welcome with that and the job's nonce, then cards with the pidfds and regions of all ranks, many in a packet. No
//     descriptor is passed between ranks after this.
//  5. All meet in a first barrier of the new group.
// A rank that dies before it has come is missed at the deadline; one that dies after it hangs up, and is named at once.

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "muster/error.hpp"
#include "muster/log.hpp"
#include "muster/sync_group.hpp"
#include "muster/version.hpp"
#include "src/base/written.hpp"
#include "src/os/process.hpp"
#include "src/os/unix_socket.hpp"
#include "src/sync/local_group.hpp"
#include "src/sync/waits.hpp"

namespace muster {
namespace sync {

std::string meeting_name(const std::string& key) {
  const XXH128_hash_t hash = XXH3_128bits(key.data(), key.size());
  return fmt::format("muster-{}-{:016x}{:016x}", os::user_id(), hash.high64, hash.low64);
}

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// These packets keep their beginning (magic, protocol, version) in all versions, so that different ones can tell each
// other so.
constexpr std::uint32_t hello_magic = 0x4d535452;  // "MSTR"
constexpr std::uint32_t protocol = 4;

struct Hello {
  std::uint32_t magic = hello_magic;
  std::uint32_t protocol_number = protocol;
  std::array<char, 24> version{};
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int64_t pid = 0;
  std::array<char, 128> host{};
};

enum class AnswerKind : std::uint32_t { welcome = 1, refusal = 2 };

struct Answer {
  std::uint32_t magic = hello_magic;
  AnswerKind kind = AnswerKind::welcome;
  SyncGroup::Nonce nonce{};
  std::uint64_t control_place = 0;
  WrittenError<1000> error = {};  // of a refusal
};

// Who the ranks are, as rank 0 passes it on: so many hellos a packet, with pidfd and region of each. One a packet would
// be a system call for every pair of ranks.
constexpr std::size_t cards_at_once = 64;
constexpr std::size_t descriptors_a_card = 2;
static_assert(cards_at_once * descriptors_a_card <= os::most_descriptors);
static_assert(sizeof(Answer) % sizeof(Hello) != 0, "they are told apart by their lengths");

constexpr std::size_t largest_packet = std::max(sizeof(Answer) + 256, cards_at_once * sizeof(Hello));

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

template <class T>
T parse(const os::Packet& packet, const char* what) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (packet.bytes.size() != sizeof(T))
    throw Error(ErrorKind::version,
                fmt::format("rendezvous: {} of {} bytes where {} has {}: the ranks run different builds", what,
                            packet.bytes.size(), version(), sizeof(T)));
  T value;
  std::memcpy(&value, packet.bytes.data(), sizeof value);
  return value;
}

/// Throws Error(peer_lost) if the other side has gone, Error(timeout).
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

// A look at those who have come costs a system call each.
constexpr milliseconds between_looks{50};

/// Rank 0's side: steps 2 to 4. `timeout` is for messages.
class Host {
 public:
  Host(const std::string& key, int size, Clock::time_point deadline, milliseconds timeout)
      : size_(size), deadline_(deadline), timeout_(timeout), guests_(static_cast<std::size_t>(size)) {
    // A group of the same key may just be going: its name lives as long as its rendezvous.
    const Clock::time_point patience = std::min(deadline, Clock::now() + std::chrono::seconds(5));
    for (;;) {
      try {
        listener_ = os::listen_abstract(meeting_name(key));
        return;
      } catch (const Error& error) {
        if (error.os_error() != EADDRINUSE) throw;
        if (Clock::now() > patience)
          throw Error(
              ErrorKind::argument,
              "another process is already rank 0 of a job with this key: give each job its own (MUSTER_JOB, or another "
              "MASTER_PORT or TORCHELASTIC_RUN_ID)",
              {.rank = 0});
      }
      check_interrupted("rendezvous");
      std::this_thread::sleep_for(milliseconds(5));
    }
  }

  Membership run() {
    try {
      collect();
      return welcome();
    } catch (const Error& error) {
      refuse_all(error);
      // Some may have got their welcome already and wait in the group.
      if (control_) control_->poison(error);
      throw;
    }
  }

 private:
  struct Guest {
    os::Fd socket;
    os::Fd pidfd;
    std::shared_ptr<Region> region;
    Hello hello;
  };

  void collect() {
    int missing = size_ - 1;
    Clock::time_point looked = Clock::now();
    while (missing != 0) {
      os::wait_readable(listener_, milliseconds(10));
      while (auto socket = os::accept_own(listener_)) doorway_.push_back(std::move(*socket));
      missing -= greet();
      if (const Clock::time_point now = Clock::now(); missing == 0 || now - looked > between_looks) {
        for (int rank = 1; rank < size_; ++rank) check_present(rank);
        looked = now;
      }
      if (missing != 0 && Clock::now() > deadline_) time_out();
      check_interrupted("rendezvous: rank 0");
    }
  }

  int greet() {
    int greeted = 0;
    for (auto visitor = doorway_.begin(); visitor != doorway_.end();) {
      os::Packet packet;
      const os::SocketStatus status = os::receive_packet(*visitor, largest_packet, packet);
      if (status == os::SocketStatus::again) {
        ++visitor;
        continue;
      }
      os::Fd socket = std::move(*visitor);
      visitor = doorway_.erase(visitor);
      if (status == os::SocketStatus::closed) continue;
      try {
        greeted += admit(socket, packet) ? 1 : 0;
      } catch (const Error&) {
        refused_.push_back(std::move(socket));
        throw;
      }
    }
    return greeted;
  }

  /// False if it was no rank. Throws if the group cannot be.
  bool admit(os::Fd& socket, os::Packet& packet) {
    std::uint32_t start[2] = {};
    if (packet.bytes.size() >= sizeof start) std::memcpy(start, packet.bytes.data(), sizeof start);
    if (start[0] != hello_magic) {
      log(LogLevel::warning, "rendezvous: a process of this user that is no rank of Muster was turned away");
      return false;
    }
    if (start[1] != protocol || packet.bytes.size() != sizeof(Hello)) {
      Hello other;
      std::memcpy(static_cast<void*>(&other), packet.bytes.data(), std::min(packet.bytes.size(), sizeof other));
      throw Error(
          ErrorKind::version,
          fmt::format(
              "a rank runs Muster {} (protocol {}), rank 0 runs {} (protocol {}): start all ranks with one version",
              get_text(other.version), start[1], version(), protocol));
    }
    const auto hello = parse<Hello>(packet, "a hello");
    if (get_text(hello.version) != version())
      throw Error(ErrorKind::version,
                  fmt::format("rank {} runs Muster {}, rank 0 runs {}: start all ranks with one version", hello.rank,
                              get_text(hello.version), version()));
    if (hello.size != size_)
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("rank {} was started in a world of {} ranks, rank 0 in one of {}", hello.rank, hello.size,
                              size_));
    if (hello.rank < 1 || hello.rank >= size_)
      throw Error(ErrorKind::rank_mismatch, fmt::format("a process (pid {}) says it is rank {} in a world of {} ranks",
                                                        hello.pid, hello.rank, size_));
    Guest& guest = guests_[static_cast<std::size_t>(hello.rank)];
    if (guest.socket)
      throw Error(ErrorKind::rank_mismatch, fmt::format("two processes (pids {} and {}) say they are rank {}",
                                                        guest.hello.pid, hello.pid, hello.rank));
    if (packet.descriptors.size() != descriptors_a_card)
      throw Error(ErrorKind::corrupt, fmt::format("rank {} came without its pidfd and its memory", hello.rank));
    auto region = std::make_shared<Region>(std::move(packet.descriptors[1]));
    guest = Guest{std::move(socket), std::move(packet.descriptors[0]), std::move(region), hello};
    return true;
  }

  void check_present(int rank) const {
    const Guest& guest = guests_[static_cast<std::size_t>(rank)];
    if (guest.pidfd && os::has_exited(guest.pidfd))
      throw Error(ErrorKind::peer_lost,
                  fmt::format("rank {} (host {}, pid {}) died during the rendezvous", rank, get_text(guest.hello.host),
                              guest.hello.pid),
                  {.rank = rank, .pid = guest.hello.pid, .host = get_text(guest.hello.host)});
  }

  [[noreturn]] void time_out() const {
    std::string names;
    int first = -1;
    for (int rank = 1; rank < size_; ++rank) {
      if (guests_[static_cast<std::size_t>(rank)].socket) continue;
      if (first < 0) first = rank;
      names += (names.empty() ? "" : ", ") + std::to_string(rank);
    }
    throw Error(ErrorKind::timeout,
                fmt::format("rendezvous: rank {} did not come to rank 0 (host {}, pid {}) within {:.1f} s: is it "
                            "started, on this host, "
                            "by this user, with the same key?",
                            names, os::host_name(), os::process_id(), std::chrono::duration<double>(timeout_).count()),
                {.rank = first});
  }

  /// Those who have come and those who come within the next moments hear why there will be no group.
  void refuse_all(const Error& error) noexcept {
    try {
      Answer answer;
      answer.kind = AnswerKind::refusal;
      answer.error.put(error);
      int told = 0;
      const auto tell = [&](const os::Fd& socket) {
        if (!socket) return;
        (void)os::send_packet(socket, bytes_of(answer));
        ++told;
      };
      for (const Guest& guest : guests_) tell(guest.socket);
      for (const os::Fd& socket : refused_) tell(socket);
      for (const os::Fd& socket : doorway_) tell(socket);
      // Who has interrupted the program waits for its end.
      const bool is_interruption = error.kind() == ErrorKind::cancelled;
      const Clock::time_point until = Clock::now() + milliseconds(is_interruption ? 50 : 1000);
      while (told < size_ - 1 && Clock::now() < until) {
        os::wait_readable(listener_, milliseconds(20));
        while (auto socket = os::accept_own(listener_)) tell(*socket);
      }
    } catch (...) {  // NOLINT(bugprone-empty-catch): the first failure is what the caller must hear
    }
  }

  Membership welcome() {
    Membership membership;
    auto peers = std::make_shared<Peers>();
    guests_[0].hello = own_hello(0, size_);
    guests_[0].pidfd = os::own_pidfd();
    guests_[0].region = Region::own();
    os::random_bytes(membership.nonce);
    peers->structure = Region::shared(os::default_backing());
    control_ = ControlBlock::create(*peers->structure, size_);
    membership.control = control_;
    Answer answer;
    answer.nonce = membership.nonce;
    answer.control_place = control_->place();
    std::vector<Hello> cards;
    std::vector<int> descriptors;
    for (const Guest& guest : guests_) {
      peers->ranks.push_back({guest.hello.rank, get_text(guest.hello.host), guest.hello.pid});
      cards.push_back(guest.hello);
      descriptors.push_back(guest.pidfd.get());
      descriptors.push_back(guest.region->memory()->get());
    }
    for (int rank = 1; rank < size_; ++rank) {
      const os::Fd& socket = guests_[static_cast<std::size_t>(rank)].socket;
      const int structure = peers->structure->memory()->get();
      send_until(socket, bytes_of(answer), std::span(&structure, 1), deadline_, rank);
      for (std::size_t begin = 0; begin < cards.size(); begin += cards_at_once) {
        const std::size_t count = std::min(cards_at_once, cards.size() - begin);
        send_until(socket, std::as_bytes(std::span(cards).subspan(begin, count)),
                   std::span(descriptors).subspan(descriptors_a_card * begin, descriptors_a_card * count), deadline_,
                   rank);
      }
    }
    for (Guest& guest : guests_) {
      peers->pidfds.push_back(std::make_shared<const os::Fd>(std::move(guest.pidfd)));
      peers->regions.push_back(std::move(guest.region));
    }
    membership.peers = std::move(peers);
    return membership;
  }

  int size_;
  Clock::time_point deadline_;
  milliseconds timeout_;
  os::Fd listener_;
  std::vector<os::Fd> doorway_;  // connected, have not said hello
  std::vector<os::Fd> refused_;  // said a hello that cannot be
  std::vector<Guest> guests_;
  std::shared_ptr<ControlBlock> control_;
};

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
}  // namespace sync

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
                                    ? sync::Host(options.key, options.size, deadline, timeout).run()
                                    : sync::Visitor(options.key, options.rank, options.size, deadline, timeout).run();
  for (std::size_t i = 0; i < options.numbers.size(); ++i) membership.peers->ranks[i].rank = options.numbers[i];
  auto group = std::make_shared<sync::LocalGroup>(std::move(membership), timeout);
  group->barrier({.timeout = {}, .stop = {}, .phase = "rendezvous"});
  return group;
}

}  // namespace muster
