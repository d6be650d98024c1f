// SPDX-License-Identifier: Apache-2.0
// tcp_group(), and how its groups end with the process. Its ranks know nothing but one address, and come to know all
// others' at a meeting:
//
//  1. Rank 0 listens at the address. All others connect to it again and again until their deadline.
//  2. Each of them says who it is (Card): the job's token, its version, rank, size, and the port that it listens at.
//     Rank 0 answers at once that it has heard, or that this is another job; whoever says nothing of the kind is a
//     stranger, and dropped.
//  3. When all have come rank 0 answers all of them: the addresses that they came from, with their ports, and a new
//     token for the connections between them. What cannot be (versions, sizes or ranks that do not fit, ranks that are
//     missing at the deadline) it answers to all who came, and throws the same.
// A rank on rank 0's host may have come from an address that no other host knows (127.0.0.1): it is told to the others
// as "where rank 0 is", and each of them knows how it reached that.
//
// At file:///PATH rank 0 takes a free port, and writes its addresses and a number of this meeting into the file
// (meeting_words.hpp), which the others read before each try. The number is part of the token: what an earlier job
// has left there leads to nobody, or to somebody who says that this is another job, and the next try reads the file
// again. Rank 0 removes the file when the meeting is over.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/log.hpp"
#include "muster/tcp.hpp"
#include "src/base/written.hpp"
#include "src/hosts/hosts_group.hpp"
#include "src/hosts/link.hpp"
#include "src/os/directory.hpp"
#include "src/os/process.hpp"
#include "src/sync/failing.hpp"
#include "src/sync/waits.hpp"
#include "src/sync/world.hpp"
#include "src/tcp/meeting_words.hpp"

namespace muster {
namespace tcp {
namespace {

struct MeetingOptions {
  std::string address;  ///< "HOST:PORT", "tcp://HOST:PORT", "file:///PATH"
  int rank = 0;
  int size = 1;
  std::string key;  ///< tells the job from others
  std::chrono::milliseconds timeout{0};
};

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Of one try of a rank; of rank 0 to say that it has heard.
constexpr milliseconds longest_try{5000};
constexpr milliseconds shortest_nap{20};
constexpr milliseconds longest_nap{500};
// Beside the ranks of the job.
constexpr std::size_t most_unknown = 64;
// What has been found out at the deadline reaches the others after it.
constexpr milliseconds last_words{1000};
// Who has interrupted rank 0 waits for its end.
constexpr milliseconds interrupted_words{50};

std::string seconds_text(milliseconds time) {
  return fmt::format("{:.1f}", std::chrono::duration<double>(time).count());
}

/// Where a meeting is.
struct Place {
  std::string path;  ///< of file:///; else empty
  std::string host;
  std::string port;
  std::optional<Endpoint> literal;  ///< HOST is a number
};

Place place_of(const std::string& address) {
  const auto refuse = [&](const char* why) {
    throw Error(
        ErrorKind::argument,
        fmt::format("tcp_group: the address '{}' {}: it is HOST:PORT (of rank 0's host, and a free port there) or "
                    "file:///PATH (of a file that all ranks see)",
                    address, why));
  };
  Place place;
  constexpr std::string_view file_scheme = "file://";
  constexpr std::string_view tcp_scheme = "tcp://";
  if (address.starts_with(file_scheme)) {
    place.path = address.substr(file_scheme.size());
    if (!place.path.starts_with('/') || place.path.ends_with('/')) refuse("has no path from the root on");
    return place;
  }
  const std::string rest = address.substr(address.starts_with(tcp_scheme) ? tcp_scheme.size() : 0);
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string::npos || colon == 0) refuse("has no port");
  place.host = rest.substr(0, colon);
  place.port = rest.substr(colon + 1);
  place.literal = parse_endpoint(rest);
  if (!parse_endpoint("127.0.0.1:" + place.port)) refuse("has no port from 1 to 65535");
  return place;
}

/// Listens where ranks send each other messages.
Acceptor listen_for_ranks(asio::io_context& io, const Place& place) {
  const bool is_for_this_host = place.literal && place.literal->address().is_loopback();
  return listen_anywhere(io, is_for_this_host ? place.literal->address() : asio::ip::address());
}

/// Lets one thing happen; false if the deadline passes, or the program is interrupted.
bool run_one(asio::io_context& io, Clock::time_point until) {
  while (Clock::now() < until) {
    if (io.stopped()) io.restart();
    if (io.run_one_until(std::min(until, Clock::now() + sync::between_questions)) != 0) return true;
    if (sync::is_interrupted()) return false;
  }
  return false;
}

/// Runs what `start` begins until it has ended. At the deadline it is cancelled. Throws Error(cancelled) if the program
/// is interrupted.
template <class Start>
error_code finish(asio::io_context& io, Socket& socket, Clock::time_point until, const Start& start) {
  std::optional<error_code> ended;
  start([&ended](const error_code& failure, auto&&...) { ended = failure; });
  while (!ended && run_one(io, until)) continue;
  if (ended) return *ended;
  error_code ignored;
  socket.close(ignored);
  if (io.stopped()) io.restart();
  while (!ended) io.run_one();
  sync::check_interrupted("tcp_group");
  return asio::error::timed_out;
}

/// Rank 0: steps 1 to 3.
class Host {
 public:
  Host(const MeetingOptions& options, const Place& place)
      : options_(options), place_(place), deadline_(Clock::now() + options.timeout) {
    if (place.path.empty()) {
      acceptor_.emplace(listen());
    } else {
      acceptor_.emplace(listen_anywhere(io_, {}));
      published_.number = os::random_hex(16);
      error_code ignored;
      const std::uint16_t port = acceptor_->local_endpoint(ignored).port();
      for (const asio::ip::address& address : own_addresses()) published_.endpoints.emplace_back(address, port);
      publish(place.path, published_);
    }
    token_ = job_token(options.key, published_.number);
    error_code ignored;
    acceptor_->non_blocking(true, ignored);
  }
  ~Host() {
    if (published_.endpoints.empty()) return;
    try {
      // A later meeting may have taken its place.
      if (const auto now = read_published(place_.path); now && now->number == published_.number)
        os::remove_file(place_.path);
    } catch (const std::exception& error) {
      log(LogLevel::warning, fmt::format("tcp_group: removing {}: {}", place_.path, error.what()));
    }
  }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  /// `port`: that rank 0 listens at for the others' messages. Returns all addresses; rank 0's own is not used.
  Addresses run(std::uint16_t port) {
    accept();
    while (!failure_ && missing() != 0 && run_one(io_, deadline_)) continue;
    const bool is_interrupted = !failure_ && missing() != 0 && sync::is_interrupted();
    if (is_interrupted)
      failure_ = Error(ErrorKind::cancelled,
                       fmt::format("tcp_group: rank 0 (host {}) was interrupted while the ranks met", os::host_name()),
                       {.rank = 0});
    if (!failure_ && missing() != 0) failure_ = late();
    if (failure_) {
      WrittenError<1600> written;
      written.put(*failure_);
      answer(AnswerKind::failure, std::as_bytes(std::span(&written, 1)),
             is_interrupted ? Clock::now() + interrupted_words : answer_deadline());
      throw Error(*failure_);
    }
    Addresses addresses;
    os::random_bytes(addresses.token);
    std::vector<AddressEntry> entries(static_cast<std::size_t>(options_.size));
    entries[0] = entry_of({}, port);
    for (const auto& guest : guests_)
      if (guest->is_here) entries[static_cast<std::size_t>(guest->card.rank)] = entry_of(guest->from, guest->card.port);
    std::vector<std::byte> body(addresses.token.begin(), addresses.token.end());
    const auto all = std::as_bytes(std::span(entries));
    body.insert(body.end(), all.begin(), all.end());
    answer(AnswerKind::addresses, body, answer_deadline());
    // Ranks that are where this one is.
    const asio::ip::address own = place_.literal ? place_.literal->address() : asio::ip::address_v4::loopback();
    for (const AddressEntry& entry : entries) addresses.of_ranks.push_back(endpoint_of(entry, own));
    return addresses;
  }

 private:
  struct Guest {
    explicit Guest(Socket connection) : socket(std::move(connection)) {}
    Socket socket;
    asio::ip::address from;
    Card card;
    bool is_here = false;
  };
  using GuestPointer = std::shared_ptr<Guest>;

  /// A name may stand for another address here than on other hosts (Debian's 127.0.1.1), a number is taken as it is.
  Acceptor listen() {
    const auto port = parse_endpoint("127.0.0.1:" + place_.port)->port();
    if (auto inherited = inherited_listener(io_, port)) return std::move(*inherited);
    if (place_.literal) return listen_at(io_, *place_.literal);
    try {
      return listen_at(io_, Endpoint(asio::ip::address_v6::any(), port));
    } catch (const Error& error) {
      if (error.os_error() == EADDRINUSE) throw;
      return listen_at(io_, Endpoint(asio::ip::address_v4::any(), port));
    }
  }

  [[nodiscard]] std::size_t missing() const {
    return static_cast<std::size_t>(options_.size) - 1 -
           static_cast<std::size_t>(std::ranges::count_if(guests_, [](const auto& guest) { return guest->is_here; }));
  }

  void accept() {
    acceptor_->async_wait(Acceptor::wait_read, [this](const error_code& failure) {
      if (failure) return;
      for (Socket socket = accept_one(*acceptor_, io_); socket.is_open(); socket = accept_one(*acceptor_, io_))
        hear(std::make_shared<Guest>(std::move(socket)));
      accept();
    });
  }

  void hear(const GuestPointer& guest) {
    if (guests_.size() > static_cast<std::size_t>(options_.size) + most_unknown) return;
    guests_.push_back(guest);
    error_code failure;
    guest->from = guest->socket.remote_endpoint(failure).address();
    asio::async_read(guest->socket, asio::buffer(&guest->card, sizeof(Card)),
                     [this, guest](const error_code& why, std::size_t) {
                       if (why || !judge(*guest)) std::erase(guests_, guest);
                     });
  }

  /// Whether it stays.
  bool judge(Guest& guest) {
    const CardVerdict verdict = verdict_on(guest.card, token_, options_.size);
    if (verdict.is_stranger) {
      log(LogLevel::info, fmt::format("tcp_group: rank 0 drops a connection from {}: it is of no rank of this job",
                                      guest.from.to_string()));
      if (verdict.is_of_muster) say(guest, AnswerKind::other_job);
      return false;
    }
    guest.is_here = !verdict.failure;
    for (const auto& other : guests_) {
      if (other.get() == &guest || !other->is_here || other->card.rank != guest.card.rank) continue;
      const bool is_again = other->card.pid == guest.card.pid && other->card.host == guest.card.host;
      // Its first connection broke.
      other->is_here = false;
      if (is_again) continue;
      failure_ = Error(ErrorKind::rank_mismatch,
                       fmt::format("tcp_group: two processes are rank {}: {} and {}", guest.card.rank,
                                   where(other->card), where(guest.card)),
                       {.rank = guest.card.rank});
      other->is_here = true;
    }
    if (verdict.failure && !failure_) failure_ = verdict.failure;
    say(guest, AnswerKind::heard);
    return true;
  }

  static void say(Guest& guest, AnswerKind kind) {
    const AnswerHead head{.kind = kind};
    error_code ignored;
    // So few bytes never wait.
    asio::write(guest.socket, asio::buffer(&head, sizeof head), ignored);
  }

  [[nodiscard]] Error late() const {
    constexpr int most = 8;
    std::string names;
    int count = 0;
    for (int rank = 1; rank < options_.size; ++rank) {
      const bool is_here = std::ranges::any_of(
          guests_, [rank](const auto& guest) { return guest->is_here && guest->card.rank == rank; });
      if (!is_here && ++count <= most) names += fmt::format("{}rank {}", names.empty() ? "" : ", ", rank);
    }
    if (count > most) names += fmt::format(" and {} more", count - most);
    return Error(
        ErrorKind::timeout,
        fmt::format("tcp_group: rank 0 (host {}) waited {} s at {} for {} of {} ranks: look whether they run, "
                    "and whether their hosts reach this address, or raise the timeout (MUSTER_TIMEOUT, seconds)",
                    os::host_name(), seconds_text(options_.timeout), options_.address, names, options_.size));
  }

  [[nodiscard]] Clock::time_point answer_deadline() const { return std::max(deadline_, Clock::now()) + last_words; }

  /// To all who are waiting for one.
  void answer(AnswerKind kind, std::span<const std::byte> body, Clock::time_point until) {
    const AnswerHead head{.kind = kind, .bytes = static_cast<std::uint32_t>(body.size())};
    std::size_t open = 0;
    for (const auto& guest : guests_) {
      if (guest->card.magic != Card::right_magic) continue;
      const std::array<asio::const_buffer, 2> parts{asio::buffer(&head, sizeof head),
                                                    asio::buffer(body.data(), body.size())};
      ++open;
      asio::async_write(guest->socket, parts, [&open](const error_code&, std::size_t) { --open; });
    }
    while (open != 0 && Clock::now() < until) {
      if (io_.stopped()) io_.restart();
      io_.run_one_until(until);
    }
    for (const auto& guest : guests_) {
      error_code ignored;
      guest->socket.close(ignored);
    }
    if (io_.stopped()) io_.restart();
    while (open != 0) io_.run_one();
  }

  const MeetingOptions& options_;
  const Place& place_;
  const Clock::time_point deadline_;
  asio::io_context io_;
  std::optional<Acceptor> acceptor_;
  PublishedAddress published_;
  Token token_{};
  std::vector<GuestPointer> guests_;
  std::optional<Error> failure_;
};

/// Any other rank.
class Visitor {
 public:
  Visitor(const MeetingOptions& options, const Place& place)
      : options_(options), place_(place), deadline_(Clock::now() + options.timeout) {}

  Addresses run(std::uint16_t port) {
    milliseconds nap = shortest_nap;
    while (Clock::now() < deadline_) {
      const auto [endpoints, number] = candidates();
      for (const Endpoint& endpoint : endpoints)
        if (auto addresses = visit(endpoint, number, port)) return std::move(*addresses);
      sync::sleep_unless_interrupted(nap, "tcp_group");
      nap = std::min(2 * nap, longest_nap);
    }
    throw Error(
        ErrorKind::timeout,
        fmt::format("tcp_group: rank {} (host {}) waited {} s for rank 0 at {}: {}: look whether rank 0 runs, and "
                    "whether its host and port can be reached from this one, or raise the timeout "
                    "(MUSTER_TIMEOUT, seconds)",
                    options_.rank, os::host_name(), seconds_text(options_.timeout), options_.address, reason_),
        {.rank = 0});
  }

 private:
  std::pair<std::vector<Endpoint>, std::string> candidates() {
    if (!place_.path.empty()) {
      auto published = read_published(place_.path);
      if (published) return {std::move(published->endpoints), std::move(published->number)};
      reason_ = "rank 0 has not written the file yet";
      return {};
    }
    if (place_.literal) return {{*place_.literal}, {}};
    error_code failure;
    std::vector<Endpoint> all;
    Protocol::resolver resolver(io_);
    // The system's own deadlines count here.
    for (const auto& entry : resolver.resolve(place_.host, place_.port, failure)) all.push_back(entry.endpoint());
    if (failure) reason_ = fmt::format("no address is known of '{}' ({})", place_.host, failure.message());
    return {std::move(all), std::string()};
  }

  std::optional<Addresses> visit(const Endpoint& endpoint, const std::string& number, std::uint16_t port) {
    Socket socket = new_socket(io_, endpoint);
    const Clock::time_point soon = std::min(deadline_, Clock::now() + longest_try);
    const auto failed = [&](const error_code& failure) {
      if (failure) reason_ = fmt::format("{} ({})", failure.message(), text_of(endpoint));
      return static_cast<bool>(failure);
    };
    if (failed(finish(io_, socket, soon, [&](auto done) { socket.async_connect(endpoint, done); })))
      return std::nullopt;
    Card card = own_card(options_.rank, options_.size, port);
    card.token = job_token(options_.key, number);
    if (failed(finish(io_, socket, soon,
                      [&](auto done) { asio::async_write(socket, asio::buffer(&card, sizeof card), done); })))
      return std::nullopt;
    AnswerHead head;
    const auto read = [&](void* place, std::size_t bytes, Clock::time_point until) {
      return !failed(
          finish(io_, socket, until, [&](auto done) { asio::async_read(socket, asio::buffer(place, bytes), done); }));
    };
    if (!read(&head, sizeof head, soon) || !is_answer(head, options_.size)) {
      reason_ = fmt::format("what listens at {} is no rank 0 that this rank understands", text_of(endpoint));
      return std::nullopt;
    }
    if (head.kind == AnswerKind::other_job) {
      reason_ = fmt::format("it is another job's rank 0 that listens at {}", text_of(endpoint));
      return std::nullopt;
    }
    if (head.kind == AnswerKind::heard) {
      reason_ = "it is there, and waits for others";
      if (!read(&head, sizeof head, deadline_ + last_words)) return std::nullopt;
      if (!is_answer(head, options_.size)) return std::nullopt;
    }
    std::vector<std::byte> body(head.bytes);
    if (!read(body.data(), body.size(), deadline_ + last_words)) return std::nullopt;
    if (head.kind == AnswerKind::failure) {
      WrittenError<1600> written;
      std::memcpy(&written, body.data(), sizeof written);
      throw written.get();
    }
    return addresses_in(body, endpoint.address());
  }

  const MeetingOptions& options_;
  const Place& place_;
  const Clock::time_point deadline_;
  asio::io_context io_;
  std::string reason_ = "nothing was tried";
};

/// Collective. Throws Error(argument) on an address that is none, Error(io) if rank 0 cannot listen there,
/// Error(timeout), Error(version), Error(rank_mismatch).
std::shared_ptr<TcpTransport> meet(const MeetingOptions& options) {
  const Place place = place_of(options.address);
  auto io = std::make_unique<asio::io_context>(1);
  Acceptor acceptor = listen_for_ranks(*io, place);
  error_code failure;
  const std::uint16_t port = acceptor.local_endpoint(failure).port();
  Addresses addresses = options.rank == 0 ? Host(options, place).run(port) : Visitor(options, place).run(port);
  return std::make_shared<TcpTransport>(options.rank, std::move(addresses), std::move(io), std::move(acceptor));
}

/// A connection that ends without a word is the loss of this rank: so the process leaves its groups before.
void end_with_process() {
  static std::once_flag once;
  std::call_once(once, [] { std::atexit([] { hosts::end_all(TcpTransport::kind_name); }); });
}

std::string key_of(const TcpGroupOptions& options) {
  if (!options.key.empty()) return options.key;
  if (const auto job = os::environment("MUSTER_JOB")) return "job " + *job;
  if (const auto run = os::environment("TORCHELASTIC_RUN_ID")) return "torchrun " + *run;
  return {};
}

[[maybe_unused]] const bool is_registered = [] {
  hosts::add_route(Route::tcp, "TCP", "make it with tcp_group()");
  sync::set_world_maker(sync::MeetBy::tcp, [](const sync::DistantWorld& world) {
    return tcp_group({.address = world.place, .rank = world.rank, .size = world.size, .key = world.key});
  });
  return true;
}();

}  // namespace
}  // namespace tcp

std::shared_ptr<SyncGroup> tcp_group(const TcpGroupOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    throw Error(ErrorKind::argument,
                fmt::format("tcp_group: rank {} of {} ranks cannot be", options.rank, options.size));
  const std::chrono::milliseconds timeout = sync::timeout_of(options.timeout, sync::default_timeout());
  hosts::advance_endings(tcp::TcpTransport::kind_name);
  const auto transport = tcp::meet({.address = options.address,
                                    .rank = options.rank,
                                    .size = options.size,
                                    .key = tcp::key_of(options),
                                    .timeout = timeout});
  tcp::end_with_process();
  return hosts::make_group(std::make_shared<hosts::Context>(transport, timeout), timeout, "tcp_group");
}

}  // namespace muster
