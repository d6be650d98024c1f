// SPDX-License-Identifier: Apache-2.0
#include "src/sync/rendezvous.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "muster/log.hpp"
#include "src/os/process.hpp"
#include "src/sync/interruption.hpp"
#include "src/sync/rendezvous_packets.hpp"

namespace muster::sync {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A look at those who have come costs a system call each.
constexpr milliseconds between_looks{50};

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

}  // namespace

Membership host_rendezvous(const std::string& key, int size, Clock::time_point deadline, milliseconds timeout) {
  return Host(key, size, deadline, timeout).run();
}

}  // namespace muster::sync
