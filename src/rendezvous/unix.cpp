// SPDX-License-Identifier: Apache-2.0
// local_group(): the processes of one host meet at an abstract Unix socket. Its name is a hash of the key, and the user
// ID.
//
//  1. In the first round each rank sends a pidfd of itself and its region, the shared memory that the other ranks may
//     map later. Rank 0 also sends a region for the group's structures, with the control block of this group in it, and
//     the nonce.
//  2. In the second round each rank reports that it has mapped the control block. Ranks exchange no descriptors after
//     that.
//  3. All ranks meet in a first barrier of the new group.

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "muster/error.hpp"
#include "muster/group.hpp"
#include "src/base/message.hpp"
#include "src/group/local_group.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/process.hpp"
#include "src/os/socket.hpp"
#include "src/rendezvous/sockets.hpp"
#include "src/rendezvous/unix.hpp"

namespace muster {
namespace rendezvous {
namespace {

using namespace std::chrono_literals;

class UnixSockets final : public Sockets {
 public:
  UnixSockets(const std::string& key, Clock::time_point deadline)
      : name_(local_name(key)), token_(token_of(key)), deadline_(deadline) {}

  std::unique_ptr<Line> reach(Hello hello, Clock::time_point, std::string& reason) override {
    auto socket = os::connect_abstract(name_);
    if (!socket) {
      reason = "no process has opened the socket of this job";
      return nullptr;
    }
    hello.token = token_;
    return greet(std::move(*socket), "@" + name_, hello);
  }
  [[nodiscard]] milliseconds pause(int) const override { return 2ms; }

 protected:
  [[nodiscard]] Token token() const override { return token_; }
  std::vector<os::Fd> listen() override {
    // An earlier group with this key holds the name until its rendezvous has ended.
    const Clock::time_point patience = std::min(deadline_, Clock::now() + 5s);
    for (;;) {
      try {
        std::vector<os::Fd> listeners;
        listeners.push_back(os::listen_abstract(name_));
        return listeners;
      } catch (const Error& error) {
        if (error.os_error() != EADDRINUSE) throw;
        if (Clock::now() > patience)
          throw Error(ErrorKind::invalid_argument,
                      "local_group: another process is already rank 0 of a job with this key. Give each job its own "
                      "(MUSTER_JOB, or another MASTER_PORT or TORCHELASTIC_RUN_ID)",
                      {.rank = 0});
      }
      group::sleep_unless_interrupted(5ms, "local_group");
    }
  }
  std::unique_ptr<Line> line_of(os::Fd socket) override {
    if (!os::is_of_own_user(socket)) return nullptr;
    return std::make_unique<SocketLine>(std::move(socket), "a process of this host");
  }

 private:
  std::string name_;
  Token token_;
  Clock::time_point deadline_;
};

/// The payload of rank 0's part.
struct GroupPlace {
  Group::Nonce nonce{};
  std::uint64_t control_place = 0;
};

}  // namespace

std::string local_name(const std::string& key) {
  const Token token = token_of(key);
  return fmt::format("muster-{}-{}", os::user_id(), os::hex_text(token));
}

std::shared_ptr<Group> join_local_group(const LocalGroupOptions& options, const std::function<void()>& watch) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    throw Error(ErrorKind::invalid_argument, out_of_range_text("local_group: rank", options.rank, options.size));
  if (options.key.empty())
    throw Error(ErrorKind::invalid_argument,
                "local_group: the key must not be empty, because ranks of different jobs could join one group. Give "
                "each job its own key");
  if (!options.global_ranks.empty() && options.global_ranks.size() != static_cast<std::size_t>(options.size))
    throw Error(ErrorKind::invalid_argument, fmt::format("local_group: expected {} global ranks, received {}",
                                                         options.size, options.global_ranks.size()));
  const milliseconds timeout = group::timeout_of(options.timeout, group::default_timeout());
  const Clock::time_point deadline = Clock::now() + timeout;
  // Each rank holds a pidfd and a region of every other rank; rank 0 also holds a socket for each of them.
  os::allow_more_open_files(3 * static_cast<std::uint64_t>(options.size) + 64);
  Session session(
      {.call = "local_group",
       .place = "on this host",
       .hint =
           "Check that all ranks run, on this host, by this user, with the same key, or raise MUSTER_TIMEOUT (seconds)",
       .rank = options.rank,
       .size = options.size,
       .deadline = deadline,
       .watch = watch,
       .numbers = options.global_ranks},
      std::make_unique<UnixSockets>(options.key, deadline));

  group::Membership membership;
  membership.rank = options.rank;
  auto peers = std::make_shared<group::Peers>();
  std::shared_ptr<const os::Fd> pidfd;
  std::shared_ptr<group::Region> region;
  std::vector<Member> members = session.round(
      [&] {
        const std::uint64_t needed = (options.rank == 0 ? 3 : 2) * static_cast<std::uint64_t>(options.size);
        if (const std::uint64_t left = os::open_files_left(); left < needed)
          throw os::open_files_error(fmt::format("a group of {} ranks on one host", options.size), needed, left);
        region = group::Region::own();
        pidfd = std::make_shared<const os::Fd>(os::own_pidfd());
        RoundPart part{.descriptors = {pidfd->get(), region->memory()->get()}};
        if (options.rank != 0) return part;
        peers->structure = group::Region::shared(os::default_backing());
        membership.control = group::ControlBlock::create(*peers->structure, options.size);
        os::random_bytes(membership.nonce);
        const GroupPlace place{membership.nonce, membership.control->place()};
        const auto bytes = std::as_bytes(std::span(&place, 1));
        part.payload.assign(bytes.begin(), bytes.end());
        part.descriptors.push_back(peers->structure->memory()->get());
        return part;
      },
      deadline);
  std::shared_ptr<group::LocalGroup> group;
  const auto join = [&] {
    std::vector<RankInfo> ranks;
    for (Member& member : members) {
      const bool is_self = member.rank == options.rank;
      const std::size_t expected = is_self && options.rank == 0 ? 0 : member.rank == 0 ? 3 : 2;
      GroupPlace place;
      if (member.descriptors.size() != expected || member.payload.size() != (member.rank == 0 ? sizeof place : 0))
        throw Error(ErrorKind::corrupt, fmt::format("local_group: malformed part of rank {}", member.rank));
      const int number =
          options.global_ranks.empty() ? member.rank : options.global_ranks[static_cast<std::size_t>(member.rank)];
      ranks.push_back({number, member.host, member.pid});
      peers->pidfds.push_back(is_self ? pidfd : std::make_shared<const os::Fd>(std::move(member.descriptors[0])));
      peers->regions.push_back(is_self ? region : std::make_shared<group::Region>(std::move(member.descriptors[1])));
      if (member.rank != 0 || is_self) continue;
      std::memcpy(&place, member.payload.data(), sizeof place);
      membership.nonce = place.nonce;
      peers->structure = std::make_shared<group::Region>(std::move(member.descriptors[2]));
      membership.control = group::ControlBlock::open(*peers->structure, place.control_place, options.size);
    }
    peers->ranks = group::RankTable::make(std::move(ranks));
    membership.peers = peers;
    group = std::make_shared<group::LocalGroup>(std::move(membership), timeout);
    return RoundPart{};
  };
  try {
    session.round(join, deadline);
  } catch (const Error& error) {
    // Ranks for which the round succeeded see that this rank leaves. They report the cause, not this rank.
    if (group) group->abort(error);
    throw;
  }
  group->barrier({.timeout = {}, .stop = {}, .phase = "rendezvous"});
  return group;
}

}  // namespace rendezvous

std::shared_ptr<Group> local_group(const LocalGroupOptions& options) {
  return rendezvous::join_local_group(options, {});
}

}  // namespace muster
