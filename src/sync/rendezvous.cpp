// SPDX-License-Identifier: Apache-2.0
#include "src/sync/rendezvous.hpp"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "muster/log.hpp"
#include "muster/version.hpp"
#include "src/base/fixed_text.hpp"
#include "src/os/pidfd.hpp"
#include "src/os/process.hpp"
#include "src/os/unix_socket.hpp"
#include "src/sync/settings.hpp"

namespace muster::sync {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// These packets keep their beginning (magic, protocol, version) in all versions, so that different ones can tell each
// other so.
constexpr std::uint32_t hello_magic = 0x4d535452;  // "MSTR"
constexpr std::uint32_t protocol = 2;

struct Hello {
  std::uint32_t magic = hello_magic;
  std::uint32_t protocol_number = protocol;
  std::array<char, 24> version{};
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int64_t pid = 0;
  std::array<char, 128> host{};
  std::array<char, 64> address{};
};

enum class AnswerKind : std::uint32_t { welcome = 1, refusal = 2 };

struct Answer {
  std::uint32_t magic = hello_magic;
  AnswerKind kind = AnswerKind::welcome;
  SyncGroup::Nonce nonce{};
  std::uint32_t error_kind = 0;
  std::int32_t error_rank = -1;
  std::array<char, 1024> text{};
};

// Who the ranks are, as rank 0 passes it on: so many hellos a packet, with their pidfds. One a packet would be a system
// call for every pair of ranks.
constexpr std::size_t cards_at_once = 64;
static_assert(cards_at_once <= os::most_descriptors);
static_assert(sizeof(Answer) % sizeof(Hello) != 0, "they are told apart by their lengths");

constexpr std::size_t largest_packet = std::max(sizeof(Answer) + 256, cards_at_once * sizeof(Hello));

// A look at those who have come costs a system call each.
constexpr milliseconds between_looks{50};

/// Descriptors that a rank of so many may need: pidfds, sockets of the rendezvous, later those of descriptor channels.
std::uint64_t descriptors_of(int size) {
  return 4 * static_cast<std::uint64_t>(size) + 64;
}

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

void send_until(const os::Fd& socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                Clock::time_point deadline, int to) {
  for (;;) {
    const os::SocketStatus status = os::send_packet(socket, bytes, descriptors);
    if (status == os::SocketStatus::done) return;
    if (status == os::SocketStatus::closed)
      throw Error(ErrorKind::peer_lost, fmt::format("rendezvous: rank {} died or hung up", to), {.rank = to});
    if (Clock::now() > deadline)
      throw Error(ErrorKind::timeout, fmt::format("rendezvous: rank {} does not take its messages", to), {.rank = to});
    // Where it is descriptors under way that are too many, the socket itself has room.
    os::wait_writable(socket, milliseconds(20));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}
void send_until(const os::Fd& socket, std::span<const std::byte> bytes, int descriptor, Clock::time_point deadline,
                int to) {
  send_until(socket, bytes, std::span(&descriptor, 1), deadline, to);
}

Hello own_hello(int rank, int size, const std::string& address) {
  Hello hello;
  put_text(hello.version, version());
  hello.rank = rank;
  hello.size = size;
  hello.pid = os::process_id();
  put_text(hello.host, os::host_name());
  put_text(hello.address, address);
  return hello;
}

Error from_answer(const Answer& answer) {
  ErrorDetails details;
  if (answer.error_rank >= 0) details.rank = answer.error_rank;
  return Error(static_cast<ErrorKind>(answer.error_kind), get_text(answer.text), details);
}

/// Rank 0's side.
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
      std::this_thread::sleep_for(milliseconds(5));
    }
  }

  Membership run(os::Fd own_listener, const std::string& address) {
    try {
      collect();
      return welcome(std::move(own_listener), address);
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

  /// False where it was no rank. Throws where the group cannot be.
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
    if (!packet.descriptor) throw Error(ErrorKind::corrupt, fmt::format("rank {} came without its pidfd", hello.rank));
    guest = Guest{std::move(socket), std::move(packet.descriptor), hello};
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
      answer.error_kind = static_cast<std::uint32_t>(error.kind());
      answer.error_rank = error.rank().value_or(-1);
      put_text(answer.text, error.what());
      auto tell = [&](const os::Fd& socket) { (void)os::send_packet(socket, bytes_of(answer)); };
      int told = 0;
      const auto tell_known = [&](const os::Fd& socket) {
        if (!socket) return;
        tell(socket);
        ++told;
      };
      for (const Guest& guest : guests_) tell_known(guest.socket);
      for (const os::Fd& socket : refused_) tell_known(socket);
      for (const os::Fd& socket : doorway_) tell_known(socket);
      const Clock::time_point until = Clock::now() + std::chrono::seconds(1);
      while (told < size_ - 1 && Clock::now() < until) {
        os::wait_readable(listener_, milliseconds(20));
        while (auto socket = os::accept_own(listener_)) {
          tell(*socket);
          ++told;
        }
      }
    } catch (...) {  // NOLINT(bugprone-empty-catch): the first failure is what the caller must hear
    }
  }

  Membership welcome(os::Fd own_listener, const std::string& address) {
    Membership membership;
    auto peers = std::make_shared<Peers>();
    guests_[0].hello = own_hello(0, size_, address);
    guests_[0].pidfd = os::own_pidfd();
    os::random_bytes(membership.nonce);
    control_ = ControlBlock::create(size_);
    membership.control = control_;
    for (Guest& guest : guests_) {
      peers->ranks.push_back({guest.hello.rank, get_text(guest.hello.host), guest.hello.pid});
      membership.addresses.push_back(get_text(guest.hello.address));
    }
    Answer answer;
    answer.nonce = membership.nonce;
    std::vector<Hello> cards;
    std::vector<int> pidfds;
    for (const Guest& guest : guests_) {
      cards.push_back(guest.hello);
      pidfds.push_back(guest.pidfd.get());
    }
    for (int rank = 1; rank < size_; ++rank) {
      const os::Fd& socket = guests_[static_cast<std::size_t>(rank)].socket;
      send_until(socket, bytes_of(answer), membership.control->memory().get(), deadline_, rank);
      for (std::size_t begin = 0; begin < cards.size(); begin += cards_at_once) {
        const std::size_t count = std::min(cards_at_once, cards.size() - begin);
        send_until(socket, std::as_bytes(std::span(cards).subspan(begin, count)),
                   std::span(pidfds).subspan(begin, count), deadline_, rank);
      }
    }
    for (Guest& guest : guests_) peers->pidfds.push_back(std::move(guest.pidfd));
    membership.peers = std::move(peers);
    membership.listener = std::move(own_listener);
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

/// The other ranks' side.
class Visitor {
 public:
  Visitor(const std::string& key, int rank, int size, Clock::time_point deadline, milliseconds timeout)
      : key_(key), rank_(rank), size_(size), deadline_(deadline), timeout_(timeout) {}

  Membership run(os::Fd own_listener, const std::string& address) {
    connect();
    const os::Fd pidfd = os::own_pidfd();
    try {
      send_until(socket_, bytes_of(own_hello(rank_, size_, address)), pidfd.get(), deadline_, 0);
    } catch (const Error& error) {
      // Hung up already: rank 0 may have left word why.
      if (error.kind() != ErrorKind::peer_lost) throw;
    }
    os::Packet packet = next("rank 0's answer");
    const auto answer = parse<Answer>(packet, "an answer");
    Membership membership;
    membership.rank = rank_;
    membership.nonce = answer.nonce;
    membership.control = ControlBlock::open(std::move(packet.descriptor), size_);
    auto peers = std::make_shared<Peers>();
    while (peers->ranks.size() < static_cast<std::size_t>(size_)) take_cards(*peers, membership.addresses);
    membership.peers = std::move(peers);
    membership.listener = std::move(own_listener);
    return membership;
  }

 private:
  void take_cards(Peers& peers, std::vector<std::string>& addresses) {
    os::Packet packet = next("the other ranks' cards");
    const std::size_t count = packet.bytes.size() / sizeof(Hello);
    if (count == 0 || packet.bytes.size() % sizeof(Hello) != 0 ||
        peers.ranks.size() + count > static_cast<std::size_t>(size_) || packet.further.size() + 1 != count)
      throw Error(ErrorKind::version,
                  fmt::format("rendezvous: cards of {} bytes with {} descriptors cannot be: the ranks run different "
                              "builds",
                              packet.bytes.size(), packet.further.size() + 1));
    std::vector<Hello> cards(count);
    std::memcpy(static_cast<void*>(cards.data()), packet.bytes.data(), packet.bytes.size());
    for (std::size_t i = 0; i < count; ++i) {
      peers.ranks.push_back({cards[i].rank, get_text(cards[i].host), cards[i].pid});
      peers.pidfds.push_back(std::move(i == 0 ? packet.descriptor : packet.further[i - 1]));
      addresses.push_back(get_text(cards[i].address));
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
            if (answer.kind == AnswerKind::refusal) throw from_answer(answer);
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

Membership rendezvous(const std::string& key, int rank, int size, milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  os::allow_open_files(descriptors_of(size));
  const std::string address = LocalChannel::fresh_address();
  os::Fd own_listener = os::listen_abstract(address);
  if (rank == 0) return Host(key, size, deadline, timeout).run(std::move(own_listener), address);
  return Visitor(key, rank, size, deadline, timeout).run(std::move(own_listener), address);
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
  sync::Membership membership = sync::rendezvous(options.key, options.rank, options.size, timeout);
  for (std::size_t i = 0; i < options.numbers.size(); ++i) membership.peers->ranks[i].rank = options.numbers[i];
  auto group = std::make_shared<sync::LocalGroup>(std::move(membership), timeout);
  group->barrier({.timeout = {}, .stop = {}, .phase = "rendezvous"});
  return group;
}

}  // namespace muster
