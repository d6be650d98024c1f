// SPDX-License-Identifier: Apache-2.0
// Messages of an MpiGroup's ranks.

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "src/mpi/mpi_waits.hpp"

namespace muster::mpi {
namespace {

/// Stands before a message to another host.
struct MessageHead {
  std::uint64_t length = 0;
};

/// Bytes that may wait for one receiver before send() waits, too.
constexpr std::uint64_t most_untaken = 256 << 10;
/// A message takes up at least so much of that, as MPI has to remember it.
constexpr std::uint64_t least_cost = 256;

/// A part of a message that its receiver has not begun to take in.
struct Untaken {
  std::vector<std::byte> bytes;
  std::uint64_t cost;
  std::shared_ptr<std::atomic<std::uint64_t>> sum;  // of all like this

  Untaken(std::size_t head, std::size_t piece, std::shared_ptr<std::atomic<std::uint64_t>> all)
      : bytes(head + piece), cost(std::max<std::uint64_t>(piece, least_cost)), sum(std::move(all)) {
    *sum += cost;
  }
  Untaken(const Untaken&) = delete;
  Untaken& operator=(const Untaken&) = delete;
  ~Untaken() { *sum -= cost; }
};

}  // namespace

int MpiGroup::tag_of(Subject subject) const noexcept {
  return tag(subject == Subject::caller ? Tag::message : Tag::exchange);
}

std::vector<std::byte> MpiGroup::take_message(int from, int tag, std::uint64_t most, const WaitOptions& options,
                                              std::chrono::milliseconds grace) {
  return or_fail(from, options, [&] { return receive_there(from, tag, most, options, grace); });
}

std::vector<std::byte> MpiGroup::receive_there(int from, int tag, std::uint64_t most, const WaitOptions& options,
                                               std::chrono::milliseconds grace) {
  Found found;
  const std::array<int, 1> on{from};
  wait([&] { return found.look(comm(), from, tag); }, {}, on, options, grace);
  const std::size_t length = found.bytes();
  if (length > most)
    sync::fail(*this,
               Error(ErrorKind::corrupt,
                     fmt::format("rank {} sends a message of {} bytes where at most {} can be", from, length, most),
                     {.rank = from}));
  const auto bytes = std::make_shared<std::vector<std::byte>>(length);
  Pending pending = found.receive(*bytes, bytes);
  // Its sender may have left the group since: the rest comes when he calls MPI the next time.
  wait([&] { return pending.test(); }, {}, on, options, grace, true);
  return std::move(*bytes);
}

void MpiGroup::do_send(int to, Subject subject, std::span<const std::byte> message, const WaitOptions& options) {
  const Phase phase(*this, options.phase);
  if (hosts_.is_here(to)) {
    locally(to, [&] { local().send(place_of(to), message, later(options), subject); });
    return;
  }
  const MessageHead head{message.size()};
  const std::array<int, 1> on{to};
  const int tag = tag_of(subject);
  std::shared_ptr<std::atomic<std::uint64_t>>& untaken = untaken_[{to, tag}];
  if (!untaken) untaken = std::make_shared<std::atomic<std::uint64_t>>(0);
  // An exchange's messages are always received. To know when they are UCX needs more of a first contact, for which a
  // rank that tells that it has no memory may have none.
  const Finished finished = subject == Subject::caller ? Finished::taken : Finished::sent;
  std::size_t sent = 0;
  do {
    const std::size_t begin = sent == 0 ? sizeof head : 0;
    const std::size_t piece = std::min(message.size() - sent, largest_piece - begin);
    auto part = std::make_shared<Untaken>(begin, piece, untaken);
    std::memcpy(part->bytes.data(), &head, begin);
    if (piece != 0) std::memcpy(part->bytes.data() + begin, message.data() + sent, piece);
    or_fail(to, options, [&] {
      const std::span<const std::byte> bytes = part->bytes;
      family_->adopt(to, start_send(comm(), to, tag, bytes, std::move(part), finished));
      wait([&] { return untaken->load() <= most_untaken; }, {}, on, options, std::chrono::milliseconds(0));
    });
    progress();
    sent += piece;
  } while (sent < message.size());
}

std::vector<std::byte> MpiGroup::do_receive(int from, Subject subject, std::uint64_t most, const WaitOptions& options) {
  const Phase phase(*this, options.phase);
  if (hosts_.is_here(from))
    return locally(from, [&] { return local().receive(place_of(from), most, later(options), subject); });
  MessageHead head;
  const std::uint64_t first = most < largest_piece - sizeof head ? sizeof head + most : largest_piece;
  std::vector<std::byte> bytes = take_message(from, tag_of(subject), first, options, std::chrono::milliseconds(0));
  if (bytes.size() >= sizeof head) std::memcpy(&head, bytes.data(), sizeof head);
  if (bytes.size() < sizeof head || head.length > most || bytes.size() - sizeof head > head.length)
    sync::fail(*this, Error(ErrorKind::corrupt,
                            fmt::format("rank {} announces a message of {} bytes where at most {} can be", from,
                                        head.length, most),
                            {.rank = from}));
  bytes.erase(bytes.begin(), bytes.begin() + sizeof head);
  while (bytes.size() < head.length) {
    const std::vector<std::byte> more =
        take_message(from, tag_of(subject), head.length - bytes.size(), options, std::chrono::milliseconds(0));
    bytes.insert(bytes.end(), more.begin(), more.end());
    progress();
  }
  return bytes;
}

}  // namespace muster::mpi
