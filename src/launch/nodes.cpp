// SPDX-License-Identifier: Apache-2.0
#include "src/launch/nodes.hpp"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <span>

#include "muster/tcp.hpp"
#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/group/error_propagation.hpp"
#include "src/os/process.hpp"
#include "src/tcp/sockets.hpp"

namespace muster::launch {
namespace {

/// The first record that each launcher sends to the others.
struct Opening {
  std::int32_t ranks = 0;
  std::int32_t master_port = 0;
  std::int32_t meeting_port = 0;
  std::array<char, 64> job{};
  std::array<char, 256> address{};
};

std::string host_of(const std::string& rendezvous) {
  constexpr std::string_view scheme = "tcp://";
  if (!rendezvous.starts_with(scheme)) return tcp::own_addresses().front().to_string();
  std::string host = rendezvous.substr(scheme.size(), rendezvous.rfind(':') - scheme.size());
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  return host;
}

}  // namespace

std::optional<ReservedPort> reserve_port(int wanted) {
  os::Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  address.sin_port = htons(static_cast<std::uint16_t>(wanted));
  const int yes = 1;
  if (!socket || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return std::nullopt;
  const int number = tcp::port_of(socket.get());
  return ReservedPort{std::move(socket), number};
}

os::Fd listen_for_ranks(int port) {
  tcp::asio::io_context io;
  tcp::Acceptor acceptor =
      port == 0 ? tcp::listen_anywhere(io, {})
                : tcp::listen_at(io, tcp::Endpoint(tcp::asio::ip::address_v4::any(), static_cast<std::uint16_t>(port)));
  return os::Fd(acceptor.release());
}

Nodes::Nodes(const LaunchNodes& options, int ranks) {
  if (options.nodes < 1 || options.node_rank < 0 || options.node_rank >= options.nodes)
    throw Error(ErrorKind::invalid_argument, out_of_range_text("job: node", options.node_rank, options.nodes));
  if (!options.rendezvous.starts_with("tcp://") && !options.rendezvous.starts_with("file://"))
    throw Error(ErrorKind::invalid_argument,
                fmt::format("job: rendezvous {}: malformed. Use tcp://HOST:PORT, an address of node 0 and a free port "
                            "there, or file:///PATH, a file that all nodes see",
                            in_quotes(options.rendezvous)));
  bell_ = os::Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell_) throw os::errno_error("job: eventfd");
  try {
    group_ = tcp_group({.address = options.rendezvous,
                        .rank = options.node_rank,
                        .size = options.nodes,
                        .timeout = options.timeout,
                        .key = "launchers"});
    Opening mine{.ranks = ranks};
    if (options.node_rank == 0) {
      place_.listener = listen_for_ranks(0);
      place_.reserved = reserve_port(0);
      mine.meeting_port = tcp::port_of(place_.listener.get());
      mine.master_port = place_.reserved ? place_.reserved->number : 0;
      put_text(mine.job, os::random_hex(16));
      put_text(mine.address, host_of(options.rendezvous));
    }
    std::vector<Opening> all(static_cast<std::size_t>(options.nodes));
    group_->all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    place_.world_size = 0;
    for (int node = 0; node < options.nodes; ++node) {
      if (node == options.node_rank) place_.rank_offset = place_.world_size;
      place_.world_size += all[static_cast<std::size_t>(node)].ranks;
    }
    place_.node = options.node_rank;
    place_.job = get_text(all[0].job);
    place_.master_address = get_text(all[0].address);
    place_.master_port = all[0].master_port;
    place_.meeting_port = all[0].meeting_port;
  } catch (const Error& error) {
    throw error.with_context(
        fmt::format("rendezvous of the launchers of {} nodes (each launcher is a rank here)", options.nodes));
  }
}

Nodes::~Nodes() {
  if (!thread_.is_started()) return;
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  // This ends the waits of the thread. The other launchers learn that this one has given up.
  give_up(Error(ErrorKind::cancelled, "its launcher has ended"));
  thread_.join();
}

void Nodes::start() {
  thread_ = os::Thread("the other launchers", [this] { run(); });
}

void Nodes::ring() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t told = ::write(bell_.get(), &one, sizeof one);
}

Nodes::News Nodes::news() {
  std::uint64_t rings = 0;
  [[maybe_unused]] const ssize_t got = ::read(bell_.get(), &rings, sizeof rings);
  const std::lock_guard lock(mutex_);
  return news_;
}

void Nodes::tell(bool has_ended, int status, const std::string& words) {
  {
    const std::lock_guard lock(mutex_);
    mine_.has_ended = has_ended ? 1 : 0;
    mine_.status = status;
    put_text(mine_.words, words);
    is_new_ = true;
  }
  changed_.notify_all();
}

void Nodes::run() {
  std::vector<EndRecord> all(static_cast<std::size_t>(group_->size()));
  try {
    for (bool all_ended = false; !all_ended;) {
      EndRecord mine;
      {
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, between_rounds, [&] { return is_new_ || stops_; });
        if (stops_) return;
        is_new_ = false;
        mine = mine_;
      }
      group_->all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
      const std::lock_guard lock(mutex_);
      all_ended = true;
      for (int node = 0; node < group_->size(); ++node) {
        const EndRecord& record = all[static_cast<std::size_t>(node)];
        all_ended = all_ended && record.has_ended != 0;
        if (node == group_->rank() || record.status == 0 || news_.status != 0) continue;
        news_.status = record.status;
        news_.words = fmt::format("node {}: {}", node, get_text(record.words));
      }
      news_.all_ended = all_ended;
      if (all_ended || news_.status != 0) ring();
    }
  } catch (const Error& error) {
    const std::lock_guard lock(mutex_);
    if (stops_) return;
    news_.all_ended = true;
    if (news_.status == 0) {
      news_.status = launch_node_lost;
      const int node = error.rank().value_or(-1);
      news_.words =
          node < 0 ? std::string(error.what()) : fmt::format("the launcher of node {} is lost: {}", node, error.what());
    }
    ring();
  }
}

}  // namespace muster::launch
