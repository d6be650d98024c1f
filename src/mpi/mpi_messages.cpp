// SPDX-License-Identifier: Apache-2.0
// Messages of an MpiGroup's ranks; and the answers of rounds, which go the same way within a host.

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

/// Begins what goes by the local group: only so a round knows its answer from messages that were sent before it.
struct LocalHead {
  enum class Kind : std::uint32_t { message = 1, answer = 2 };
  Kind kind = Kind::message;
  std::uint32_t round = 0;  ///< of an answer
  std::uint64_t length = 0;
};

// Messages up to this length follow their head at once; longer ones are not copied for it.
constexpr std::size_t most_with_head = 4096;

std::vector<std::byte> with_head(const LocalHead& head, std::span<const std::byte> bytes) {
  std::vector<std::byte> whole(sizeof head + bytes.size());
  std::memcpy(whole.data(), &head, sizeof head);
  if (!bytes.empty()) std::memcpy(whole.data() + sizeof head, bytes.data(), bytes.size());
  return whole;
}

/// Takes it off.
LocalHead head_of(std::vector<std::byte>& whole) {
  LocalHead head{};
  if (whole.size() < sizeof head) return {.kind = {}, .round = 0, .length = 0};
  std::memcpy(&head, whole.data(), sizeof head);
  whole.erase(whole.begin(), whole.begin() + sizeof head);
  return head;
}

}  // namespace

void MpiGroup::give_answer(int to, std::span<const std::byte> all, const WaitOptions& options) {
  const LocalHead head{LocalHead::Kind::answer, round_, all.size()};
  locally(to, [&] { local().send(place_of(to), with_head(head, all), options); });
}

void MpiGroup::take_answer(int leader, std::span<std::byte> all, const WaitOptions& options) {
  for (;;) {
    std::vector<std::byte> bytes = locally(leader, [&] {
      return local().receive(place_of(leader), sizeof(LocalHead) + std::max(most_with_head, all.size()), options);
    });
    const LocalHead head = head_of(bytes);
    if (head.kind == LocalHead::Kind::message) {
      if (bytes.size() != head.length)
        bytes = locally(leader, [&] { return local().receive(place_of(leader), head.length, options); });
      put_aside_.push_back(std::move(bytes));
      continue;
    }
    if (head.kind != LocalHead::Kind::answer || head.round != round_ || bytes.size() != all.size())
      fail(Error(ErrorKind::rank_mismatch,
                 fmt::format("in '{}' rank {} is in round {} and expects {} bytes, and rank {} gives {} in round {}: "
                             "the ranks are in different calls",
                             options.phase, rank(), round_, all.size(), leader, bytes.size(), head.round),
                 {.rank = leader}));
    if (!all.empty()) std::memcpy(all.data(), bytes.data(), all.size());
    return;
  }
}

void MpiGroup::send_here(int to, std::span<const std::byte> message, const WaitOptions& options) {
  const LocalHead head{LocalHead::Kind::message, 0, message.size()};
  const bool is_short = message.size() <= most_with_head;
  locally(to, [&] {
    local().send(place_of(to), with_head(head, message.first(is_short ? message.size() : 0)), options);
    if (!is_short) local().send(place_of(to), message, options);
  });
}

std::vector<std::byte> MpiGroup::receive_here(int from, std::uint64_t most, const WaitOptions& options) {
  const auto check_length = [&](std::uint64_t length) {
    if (length > most)
      fail(Error(ErrorKind::corrupt,
                 fmt::format("rank {} announces a message of {} bytes where at most {} can be", from, length, most),
                 {.rank = from}));
  };
  if (from == hosts_.leader(hosts_.mine) && !put_aside_.empty()) {
    check_length(put_aside_.front().size());
    std::vector<std::byte> message = std::move(put_aside_.front());
    put_aside_.pop_front();
    return message;
  }
  std::vector<std::byte> bytes =
      locally(from, [&] { return local().receive(place_of(from), sizeof(LocalHead) + most_with_head, options); });
  const LocalHead head = head_of(bytes);
  if (head.kind != LocalHead::Kind::message)
    fail(Error(ErrorKind::rank_mismatch,
               fmt::format("in '{}' rank {} waits for a message of rank {}, which is in a round: the ranks are in "
                           "different calls",
                           options.phase, rank(), from),
               {.rank = from}));
  check_length(head.length);
  if (bytes.size() != head.length)
    bytes = locally(from, [&] { return local().receive(place_of(from), head.length, options); });
  return bytes;
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

void MpiGroup::do_send(int to, std::span<const std::byte> message, const WaitOptions& options) {
  const Phase phase(*this, options.phase);
  if (hosts_.is_here(to)) {
    send_here(to, message, later(options));
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
      Pending pending = start_send(comm(), to, tag(Tag::message), *bytes, bytes);
      wait([&] { return pending.test(); }, {}, on, options, std::chrono::milliseconds(0));
    });
    progress();
    sent += piece;
  } while (sent < message.size());
}

std::vector<std::byte> MpiGroup::do_receive(int from, std::uint64_t most, const WaitOptions& options) {
  const Phase phase(*this, options.phase);
  if (hosts_.is_here(from)) return receive_here(from, most, later(options));
  MessageHead head;
  std::vector<std::byte> bytes =
      take_message(from, tag(Tag::message), largest_piece, options, std::chrono::milliseconds(0));
  if (bytes.size() >= sizeof head) std::memcpy(&head, bytes.data(), sizeof head);
  if (bytes.size() < sizeof head || head.length > most || bytes.size() - sizeof head > head.length)
    fail(Error(ErrorKind::corrupt,
               fmt::format("rank {} announces a message of {} bytes where at most {} can be", from, head.length, most),
               {.rank = from}));
  bytes.erase(bytes.begin(), bytes.begin() + sizeof head);
  while (bytes.size() < head.length) {
    const std::vector<std::byte> more =
        take_message(from, tag(Tag::message), head.length - bytes.size(), options, std::chrono::milliseconds(0));
    bytes.insert(bytes.end(), more.begin(), more.end());
    progress();
  }
  return bytes;
}

}  // namespace muster::mpi
