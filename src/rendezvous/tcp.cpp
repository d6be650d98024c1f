// SPDX-License-Identifier: Apache-2.0
// tcp_group(), and the end of its groups with the process. The ranks know one address, at which they hold a rendezvous
// (src/rendezvous/session.hpp):
//
//  1. Rank 0 listens at the address. One rank per host connects to it, and passes the messages of the other ranks of
//     its host on (relay.hpp). Each rank contributes the port at which it listens for the other ranks. Rank 0 sees the
//     addresses of the hosts, and adds a token for the connections between ranks. It sends each rank the addresses of
//     its neighbours in a tree of ranks.
//  2. Over these connections the ranks exchange all addresses, and find out which of them share memory
//     (src/multihost/hosts.hpp). The session remains open meanwhile, so that a rank that ends is noticed and named.
//  3. A last round of the session ends it on all ranks.
// A rank on the host of rank 0 may have connected from an address that other hosts cannot use (127.0.0.1). The other
// ranks then use the address at which they have reached rank 0.
//
// For file:///PATH rank 0 takes a free port, and writes its addresses and a random number into the file
// (address_file.hpp). The other ranks read the file before each attempt. The number is part of the token in a Hello, so
// the file of an earlier job cannot lead to a rank of this job. Rank 0 removes the file when the rendezvous is
// complete.

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "muster/log.hpp"
#include "muster/tcp.hpp"
#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/watchdog.hpp"
#include "src/multihost/group.hpp"
#include "src/multihost/stream_protocol.hpp"
#include "src/os/directory.hpp"
#include "src/os/process.hpp"
#include "src/rendezvous/address_file.hpp"
#include "src/rendezvous/relay.hpp"
#include "src/tcp/transport.hpp"

namespace muster {
namespace tcp {
namespace {

using rendezvous::milliseconds;

/// The address of the rendezvous.
struct RendezvousAddress {
  std::string path;  ///< the path of file:///; otherwise empty
  std::string host;
  std::uint16_t port = 0;
  std::optional<Endpoint> literal;  ///< set if HOST is numeric
};

RendezvousAddress place_of(const std::string& address) {
  const auto refuse = [&](const char* why) {
    throw Error(ErrorKind::invalid_argument,
                fmt::format("tcp_group: address {}: {}. Use HOST:PORT (the host of rank 0, and a free port there) or "
                            "file:///PATH (a file that all ranks see)",
                            in_quotes(address), why));
  };
  RendezvousAddress place;
  constexpr std::string_view file_scheme = "file://";
  constexpr std::string_view tcp_scheme = "tcp://";
  if (address.starts_with(file_scheme)) {
    place.path = address.substr(file_scheme.size());
    if (!place.path.starts_with('/') || place.path.ends_with('/')) refuse("the path of the file must be absolute");
    return place;
  }
  const std::string rest = address.substr(address.starts_with(tcp_scheme) ? tcp_scheme.size() : 0);
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string::npos || colon == 0) refuse("the port is missing");
  place.host = rest.substr(0, colon);
  place.literal = parse_endpoint(rest);
  const auto port = parse_endpoint("127.0.0.1:" + rest.substr(colon + 1));
  if (!port) refuse("the port must be from 1 to 65535");
  place.port = port->port();
  return place;
}

rendezvous::Token job_token(std::string_view key, std::string_view number) {
  return rendezvous::token_of(fmt::format("muster tcp {} {}", number, key));
}

/// Returns the address as an IPv6 address. Returns zeros if other hosts cannot use it.
std::array<std::uint8_t, 16> bytes_of(const asio::ip::address& address) {
  asio::ip::address plain = address;
  if (plain.is_v6() && plain.to_v6().is_v4_mapped())
    plain = asio::ip::make_address_v4(asio::ip::v4_mapped, plain.to_v6());
  if (plain.is_loopback() || plain.is_unspecified()) return {};
  return plain.is_v6() ? plain.to_v6().to_bytes()
                       : asio::ip::make_address_v6(asio::ip::v4_mapped, plain.to_v4()).to_bytes();
}

/// The reverse of bytes_of().
asio::ip::address address_of(const std::array<std::uint8_t, 16>& bytes) {
  return Addresses{}.endpoint_of({.address = bytes}).address();
}

class TcpSockets final : public rendezvous::Sockets {
 public:
  TcpSockets(RendezvousAddress place, std::string key, int listener)
      : place_(std::move(place)), key_(std::move(key)), given_listener_(listener) {
    if (place_.literal) first_ = place_.literal->address();
  }
  ~TcpSockets() override { unpublish(); }

  std::unique_ptr<rendezvous::Line> reach(rendezvous::Hello hello, rendezvous::Clock::time_point until,
                                          std::string& reason) override {
    if (relay_) relay_->tell_reason(reason);
    const auto [endpoints, number] = candidates(reason);
    if (endpoints.empty()) return nullptr;
    hello.token = job_token(key_, number);
    // The file names another rank 0 now.
    if (relay_ && relay_->token() != hello.token) relay_.reset();
    if (!relay_ && !news_.was_silent)
      if (auto line = join_relay(hello)) return line;
    // If one of several addresses belongs to a stranger, the next attempt begins with the next address.
    for (std::size_t i = 0; i < endpoints.size(); ++i) {
      const Endpoint& endpoint = endpoints[next_++ % endpoints.size()];
      os::Fd socket = connect(endpoint, until, reason);
      if (!socket) continue;
      first_ = endpoint.address();
      news_.root = {};
      auto line = greet(std::move(socket), text_of(endpoint), hello);
      if (relay_) return relay_->make_trunk(std::move(line), bytes_of(first_));
      return line;
    }
    return nullptr;
  }
  [[nodiscard]] milliseconds pause(int tries) const override {
    return milliseconds(std::min(1 << std::min(tries, 9), 500));
  }

  std::vector<std::unique_ptr<rendezvous::Line>> arrivals() override {
    auto lines = Sockets::arrivals();
    std::erase_if(trunks_, [](const auto& trunk) { return trunk.expired(); });
    for (const auto& weak : trunks_)
      if (const auto trunk = weak.lock())
        for (auto& branch : trunk->take_fresh())
          lines.push_back(std::make_unique<rendezvous::TrunkLine>(trunk, std::move(branch)));
    return lines;
  }

  void tell_all(std::span<rendezvous::Line* const> lines, const rendezvous::OutgoingPointer& message) override {
    std::map<rendezvous::Trunk*, std::vector<std::uint32_t>> numbers;
    for (rendezvous::Line* const line : lines) {
      auto& on_trunk = static_cast<rendezvous::TrunkLine&>(*line);
      numbers[&on_trunk.trunk()].push_back(on_trunk.number());
    }
    for (const auto& [trunk, of_trunk] : numbers) trunk->send(of_trunk, message);
  }

  void wait(std::span<rendezvous::Line* const> lines, milliseconds longest) override {
    std::vector<rendezvous::SocketLine*> sockets = rendezvous::carriers_of(lines);
    std::vector<const os::Fd*> all_listeners = listeners();
    if (relay_) relay_->add_to(sockets, all_listeners);
    const bool has_fresh = std::ranges::any_of(trunks_, [](const auto& weak) {
      const auto trunk = weak.lock();
      return trunk && trunk->has_fresh();
    });
    rendezvous::wait_for_sockets(sockets, all_listeners, has_fresh ? milliseconds(0) : longest);
    if (relay_) relay_->move();
  }

  /// Returns the address at which this rank has reached rank 0, or its relay has; on rank 0, its own address.
  [[nodiscard]] asio::ip::address first() const {
    return news_.root == std::array<std::uint8_t, 16>{} ? first_ : address_of(news_.root);
  }

 protected:
  [[nodiscard]] rendezvous::Token token() const override { return job_token(key_, published_.number); }

  std::vector<os::Fd> listen() override {
    asio::io_context io;
    std::vector<os::Fd> all;
    if (place_.path.empty()) {
      all.emplace_back(listen_at_place(io).release());
    } else {
      Acceptor acceptor = listen_anywhere(io, {});
      published_.number = os::random_hex(16);
      for (const asio::ip::address& address : own_addresses())
        published_.endpoints.emplace_back(address, acceptor.local_endpoint().port());
      all.emplace_back(acceptor.release());
    }
    try {
      all.push_back(os::listen_abstract(rendezvous::relay_name(token(), text())));
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): another rank of this host is the relay already
    }
    if (!place_.path.empty()) publish(place_.path, published_);
    return all;
  }

  std::unique_ptr<rendezvous::Line> line_of(os::Fd socket) override {
    Endpoint from;
    socklen_t length = static_cast<socklen_t>(from.capacity());
    if (::getpeername(socket.get(), from.data(), &length) != 0) return nullptr;
    std::unique_ptr<rendezvous::SocketLine> line;
    if (from.data()->sa_family == AF_UNIX) {
      if (!os::is_of_own_user(socket)) return nullptr;
      line = std::make_unique<rendezvous::SocketLine>(std::move(socket), "a process of this host");
    } else {
      from.resize(length);
      tune(socket.get());
      line = std::make_unique<rendezvous::SocketLine>(std::move(socket), text_of(from), bytes_of(from.address()));
    }
    const auto trunk = std::make_shared<rendezvous::Trunk>(std::move(line));
    trunks_.push_back(trunk);
    return std::make_unique<rendezvous::TrunkLine>(trunk);
  }

 private:
  /// Returns the address in one form.
  [[nodiscard]] std::string text() const {
    return place_.path.empty() ? fmt::format("{}:{}", place_.host, place_.port) : place_.path;
  }

  /// Connects to the relay of this host, and returns the line. Returns null if this rank has become the relay itself,
  /// or must do without one.
  std::unique_ptr<rendezvous::Line> join_relay(const rendezvous::Hello& hello) {
    const std::string name = rendezvous::relay_name(hello.token, text());
    // Between its two system calls, another rank has claimed the name but does not listen yet.
    constexpr int most_tries = 50;
    for (int tries = 0; tries < most_tries; ++tries) {
      try {
        if (auto socket = os::connect_abstract(name)) {
          std::string from = fmt::format("rank 0 or the relay of this host (pid {})", os::peer_pid(*socket));
          return std::make_unique<rendezvous::LineToRelay>(greet(std::move(*socket), std::move(from), hello), news_);
        }
        relay_ = std::make_unique<rendezvous::Relay>(os::listen_abstract(name), hello);
        return nullptr;
      } catch (const Error& error) {
        if (error.os_error() == EADDRINUSE) {
          group::sleep_unless_interrupted(milliseconds(1), "tcp_group");
          continue;
        }
        log(LogLevel::info, fmt::format("tcp_group: this rank connects to rank 0 itself: {}", error.what()));
        return nullptr;
      }
    }
    return nullptr;
  }

  /// A host name may resolve to a different address here than on other hosts (127.0.1.1 on Debian). A numeric address
  /// is used unchanged.
  Acceptor listen_at_place(asio::io_context& io) {
    if (given_listener_) {
      Acceptor acceptor = adopt_listener(io, given_listener_.get());
      (void)given_listener_.release();
      return acceptor;
    }
    if (auto inherited = inherited_listener(io, place_.port)) return std::move(*inherited);
    if (place_.literal) return listen_at(io, *place_.literal);
    try {
      return listen_at(io, Endpoint(asio::ip::address_v6::any(), place_.port));
    } catch (const Error& error) {
      if (error.os_error() == EADDRINUSE) throw;
      return listen_at(io, Endpoint(asio::ip::address_v4::any(), place_.port));
    }
  }

  void unpublish() noexcept {
    if (published_.endpoints.empty()) return;
    try {
      // A later rendezvous may have replaced the file.
      if (const auto now = read_published(place_.path); now && now->number == published_.number)
        os::remove_file(place_.path);
    } catch (const std::exception& error) {
      log(LogLevel::warning, fmt::format("tcp_group: removing {}: {}", in_quotes(place_.path), error.what()));
    }
  }

  std::pair<std::vector<Endpoint>, std::string> candidates(std::string& reason) const {
    if (!place_.path.empty()) {
      if (auto published = read_published(place_.path))
        return {std::move(published->endpoints), std::move(published->number)};
      reason = "rank 0 has not written the file yet";
      return {};
    }
    if (place_.literal) return {{*place_.literal}, {}};
    std::vector<Endpoint> all;
    addrinfo* list = nullptr;
    addrinfo wanted{};
    wanted.ai_socktype = SOCK_STREAM;
    // The deadlines of the system apply here.
    const int failure = ::getaddrinfo(place_.host.c_str(), nullptr, &wanted, &list);
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(failure == 0 ? list : nullptr, [](addrinfo* one) {
      if (one != nullptr) ::freeaddrinfo(one);
    });
    for (const addrinfo* one = owner.get(); one != nullptr; one = one->ai_next) {
      Endpoint endpoint;
      if (one->ai_addrlen > endpoint.capacity()) continue;
      std::memcpy(endpoint.data(), one->ai_addr, one->ai_addrlen);
      endpoint.resize(one->ai_addrlen);
      endpoint.port(place_.port);
      all.push_back(endpoint);
    }
    if (all.empty())
      reason = fmt::format("the name {} has no known address ({})", in_quotes(place_.host), ::gai_strerror(failure));
    return {std::move(all), std::string()};
  }

  /// Returns an empty Fd if no process listens there, and sets the reason.
  os::Fd connect(const Endpoint& endpoint, rendezvous::Clock::time_point until, std::string& reason) {
    asio::io_context io;
    os::Fd socket(new_socket(io, endpoint).release());
    tune(socket.get());
    int failure = ::connect(socket.get(), endpoint.data(), static_cast<socklen_t>(endpoint.size())) == 0 ? 0 : errno;
    while (failure == EINPROGRESS || failure == EINTR || failure == EAGAIN) {
      group::check_interrupted("tcp_group");
      pollfd entry{socket.get(), POLLOUT, 0};
      os::poll_sockets({&entry, 1}, group::between_questions);
      if (relay_) relay_->move();
      socklen_t length = sizeof failure;
      if (entry.revents != 0)
        ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &failure, &length);
      else if (rendezvous::Clock::now() >= until)
        failure = ETIMEDOUT;
    }
    if (failure == 0) return socket;
    reason = fmt::format("{} ({})", ::strerror(failure), text_of(endpoint));
    return {};
  }

  const RendezvousAddress place_;
  const std::string key_;
  os::Fd given_listener_;
  PublishedAddress published_;
  asio::ip::address first_ = asio::ip::address_v4::loopback();
  std::size_t next_ = 0;
  std::vector<std::weak_ptr<rendezvous::Trunk>> trunks_;  // used by rank 0
  std::unique_ptr<rendezvous::Relay> relay_;              // set on the relay of this host
  rendezvous::RelayNews news_;
};

/// The contribution of a rank to the first round.
struct FirstRoundPart {
  Token token{};  ///< the token of rank 0 is used
  std::uint16_t port = 0;
};

std::string key_of(const TcpGroupOptions& options) {
  if (!options.key.empty()) return options.key;
  if (const auto job = os::environment("MUSTER_JOB")) return "job " + *job;
  if (const auto run = os::environment("TORCHELASTIC_RUN_ID")) return "torchrun " + *run;
  return {};
}

/// Returns the ranks whose parts a rank needs before the transport distributes the addresses of all: its neighbours in
/// the tree, itself, and rank 0 for the token.
std::vector<int> ranks_needed(int rank, int size) {
  std::vector<int> ranks = TcpTransport::neighbours_in_tree(rank, size);
  if (ranks.front() != 0) ranks.insert(ranks.begin(), 0);
  return ranks;
}

/// Step 1.
std::shared_ptr<TcpTransport> meet(const TcpGroupOptions& options, const RendezvousAddress& place,
                                   rendezvous::Session& session, const TcpSockets& sockets,
                                   rendezvous::Clock::time_point deadline) {
  auto io = std::make_unique<asio::io_context>(1);
  std::optional<Acceptor> acceptor;
  FirstRoundPart mine;
  const std::vector<rendezvous::Member> members = session.round(
      [&] {
        const bool is_for_this_host = place.literal && place.literal->address().is_loopback();
        acceptor = listen_anywhere(*io, is_for_this_host ? place.literal->address() : asio::ip::address());
        os::random_bytes(mine.token);
        mine.port = acceptor->local_endpoint().port();
        const auto bytes = std::as_bytes(std::span(&mine, 1));
        return rendezvous::RoundPart{.payload = {bytes.begin(), bytes.end()}};
      },
      deadline);
  Addresses addresses{.of_ranks = std::vector<Endpoint>(static_cast<std::size_t>(options.size)),
                      .root = sockets.first()};
  for (const rendezvous::Member& member : members) {
    FirstRoundPart part;
    if (member.payload.size() != sizeof part)
      throw Error(ErrorKind::corrupt, fmt::format("tcp_group: malformed part of rank {}", member.rank),
                  {.rank = member.rank});
    std::memcpy(&part, member.payload.data(), sizeof part);
    if (member.rank == 0) addresses.token = part.token;
    const RankAddress contact{.address = member.address, .port = part.port};
    if (member.rank == options.rank) addresses.own = contact;
    addresses.of_ranks[static_cast<std::size_t>(member.rank)] = addresses.endpoint_of(contact);
  }
  return std::make_shared<TcpTransport>(options.rank, std::move(addresses), std::move(io), std::move(*acceptor));
}

/// A connection that ends without `bye` counts as the loss of this rank. So the process leaves its groups before it
/// ends.
void end_with_process() {
  static std::once_flag once;
  std::call_once(once, [] { std::atexit([] { multihost::end_all(TcpTransport::kind_name); }); });
}

[[maybe_unused]] const bool is_registered = [] {
  multihost::add_route(Route::tcp, "TCP", "create it with tcp_group()");
  return true;
}();

}  // namespace
}  // namespace tcp

std::shared_ptr<Group> tcp_group(const TcpGroupOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    throw Error(ErrorKind::invalid_argument, out_of_range_text("tcp_group: rank", options.rank, options.size));
  const rendezvous::milliseconds timeout = group::timeout_of(options.timeout, group::default_timeout());
  const rendezvous::Clock::time_point deadline = rendezvous::Clock::now() + timeout;
  multihost::advance_endings(tcp::TcpTransport::kind_name);
  const tcp::RendezvousAddress place = tcp::place_of(options.address);
  if (options.size > 1 && !tcp::has_network())
    throw Error(
        ErrorKind::unsupported,
        fmt::format("tcp_group: rank {} (host {}, pid {}) cannot reach other ranks: no network interface of its host "
                    "is up. Start one (for ranks of one host: ip link set lo up), or use local_group()",
                    options.rank, os::host_name(), os::process_id()),
        {.rank = options.rank, .pid = os::process_id(), .host = os::host_name()});
  const std::uint64_t open_files_left = os::open_files_left();
  // The rendezvous has one connection per host at rank 0, and one per rank of its host at a relay.
  os::allow_more_open_files(static_cast<std::uint64_t>(options.size) + 64);
  auto owner = std::make_unique<tcp::TcpSockets>(place, tcp::key_of(options), options.listener);
  const tcp::TcpSockets& sockets = *owner;
  rendezvous::Session session(
      {.call = "tcp_group",
       .place = "at " + options.address,
       .hint = options.rank == 0 ? "Check that all ranks run and that their hosts can reach this address, "
                                   "or raise MUSTER_TIMEOUT (seconds)"
                                 : "Check that rank 0 is running and that its port can be reached from this "
                                   "host, or raise MUSTER_TIMEOUT (seconds)",
       .rank = options.rank,
       .size = options.size,
       .deadline = deadline,
       .needed = [size = options.size](int rank) { return tcp::ranks_needed(rank, size); }},
      std::move(owner));
  try {
    const auto transport = tcp::meet(options, place, session, sockets, deadline);
    tcp::end_with_process();
    // Step 2.
    transport->set_watch([&session] { session.watch(); });
    auto group = multihost::make_group(std::make_shared<multihost::Context>(transport, timeout), timeout, "tcp_group",
                                       open_files_left);
    transport->set_watch({});
    // The last messages of the group's barrier may be for ranks to which this rank is still connecting. No rank polls
    // these connections during step 3.
    while (!transport->has_sent_all() && rendezvous::Clock::now() < deadline) {
      session.watch();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    // Step 3.
    session.round([] { return rendezvous::RoundPart{}; }, rendezvous::Clock::now() + timeout);
    return group;
  } catch (const Error& error) {
    throw session.settle(error);
  }
}

}  // namespace muster
