// SPDX-License-Identifier: Apache-2.0
// Messages of an MpiGroup's ranks.

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "src/mpi/mpi_waits.hpp"

namespace muster::mpi {
namespace {

/// Stands before a message to another host.
struct MessageHead {
  std::uint64_t length = 0;
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
  MPI_Message found = MPI_MESSAGE_NULL;
  MPI_Status status{};
  const std::array<int, 1> on{from};
  wait(
      [&] {
        // Asked again after it was true: who is about to be blamed may have sent before.
        if (found != MPI_MESSAGE_NULL) return true;
        throw_if_resting();
        int flag = 0;
        check(MPI_Improbe(from, tag, comm().get(), &flag, &found, &status), "looking for a message");
        return flag != 0;
      },
      {}, on, options, grace);
  int length = 0;
  check(MPI_Get_count(&status, MPI_BYTE, &length), "asking for a message's length");
  if (static_cast<std::uint64_t>(length) > most)
    fail(Error(ErrorKind::corrupt,
               fmt::format("rank {} sends a message of {} bytes where at most {} can be", from, length, most),
               {.rank = from}));
  const auto bytes = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(length));
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Imrecv(bytes->data(), length, MPI_BYTE, &found, &request), "receiving a message");
  Pending pending(request, bytes);
  wait([&] { return pending.test(); }, {}, on, options, grace);
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
  std::size_t sent = 0;
  do {
    const std::size_t begin = sent == 0 ? sizeof head : 0;
    const std::size_t piece = std::min(message.size() - sent, largest_piece - begin);
    // What is sent has to stay where a wait fails.
    const auto bytes = std::make_shared<std::vector<std::byte>>(begin + piece);
    std::memcpy(bytes->data(), &head, begin);
    if (piece != 0) std::memcpy(bytes->data() + begin, message.data() + sent, piece);
    or_fail(to, options, [&] {
      Pending pending = start_send(comm(), to, tag_of(subject), *bytes, bytes);
      wait([&] { return pending.test(); }, {}, on, options, std::chrono::milliseconds(0));
    });
    progress();
    sent += piece;
  } while (sent < message.size());
}

SyncGroup::Letter MpiGroup::do_receive(int from, Subject wanted, std::uint64_t most, const WaitOptions& options) {
  const Phase phase(*this, options.phase);
  if (hosts_.is_here(from))
    return {wanted, locally(from, [&] { return local().receive(place_of(from), most, later(options), wanted); })};
  MessageHead head;
  const std::uint64_t first = most < largest_piece - sizeof head ? sizeof head + most : largest_piece;
  std::vector<std::byte> bytes = take_message(from, tag_of(wanted), first, options, std::chrono::milliseconds(0));
  if (bytes.size() >= sizeof head) std::memcpy(&head, bytes.data(), sizeof head);
  if (bytes.size() < sizeof head || head.length > most || bytes.size() - sizeof head > head.length)
    fail(Error(ErrorKind::corrupt,
               fmt::format("rank {} announces a message of {} bytes where at most {} can be", from, head.length, most),
               {.rank = from}));
  bytes.erase(bytes.begin(), bytes.begin() + sizeof head);
  while (bytes.size() < head.length) {
    const std::vector<std::byte> more =
        take_message(from, tag_of(wanted), head.length - bytes.size(), options, std::chrono::milliseconds(0));
    bytes.insert(bytes.end(), more.begin(), more.end());
    progress();
  }
  return {wanted, std::move(bytes)};
}

}  // namespace muster::mpi
