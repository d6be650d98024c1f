// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages of a rendezvous. They are the same over every transport: a header (Head), a body and, over Unix sockets,
// file descriptors. The layouts of Head and Hello never change, so that a rank recognizes a rank of another version.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "src/os/fd.hpp"

namespace muster::rendezvous {

enum class Word : std::uint32_t {
  hello = 1,      ///< to rank 0: the sender joins; the body is its Hello
  heard = 2,      ///< from rank 0: it accepts the hello; the body is its own Hello. Other ranks may still be missing
  other_job = 3,  ///< from rank 0: this rank 0 belongs to another job
  part = 4,       ///< to rank 0: the sender's part of a round
  late = 5,       ///< to rank 0: the sender's deadline has passed
  all = 6,        ///< from rank 0: the parts of all ranks, or of those that the receiver needs (Terms::needed)
  failure = 7,    ///< in both directions: the cause that ends the rendezvous
  // A relay (relay.hpp) uses these words. No Hello precedes `relay_card`.
  through = 8,  ///< between rank 0 and a relay: a message of ranks behind the relay, after the numbers of their lines
  line_ended = 9,   ///< from a relay to rank 0: the connection of a rank behind it has ended; the body is a LineEnd
  relay_card = 10,  ///< from a relay to a rank behind it: the relay is alive; the body is a RelayCard
};

struct MessageHead {
  static constexpr std::uint64_t right_magic = 0x7461'6572'7473'756d;  // "mustreat"
  std::uint64_t magic = right_magic;
  Word word = Word::hello;
  std::uint32_t descriptors = 0;
  std::uint64_t bytes = 0;  ///< length of the body
};
static_assert(sizeof(MessageHead) == 24);

/// Identifies a job. Rank 0 turns away processes that send another token.
using Token = std::array<std::byte, 16>;
Token token_of(std::string_view text);

/// Identifies a rank and its process.
struct Hello {
  Token token{};
  std::array<char, 24> version{};
  std::int32_t rank = -1;
  std::int32_t size = 0;
  std::int64_t pid = 0;
  std::array<char, 128> host{};
  std::uint32_t attempt = 0;  ///< counts the attempts of this process, so that rank 0 can tell an old hello
  std::array<std::byte, 68> reserved{};
};
static_assert(sizeof(Hello) == 256);
/// Returns the Hello of this process; its token is not set.
Hello own_hello(int rank, int size);

/// A received message.
struct Message {
  Word word = Word::hello;
  std::vector<std::byte> body = {};
  std::vector<os::Fd> descriptors = {};
  bool is_turned = false;  ///< the sender has the other byte order
};
/// A message to be sent. `bytes` holds its header and its body. The caller keeps the descriptors open until the message
/// has been sent.
struct OutgoingMessage {
  std::vector<std::byte> bytes;
  std::vector<int> descriptors;
};
using OutgoingPointer = std::shared_ptr<const OutgoingMessage>;
OutgoingPointer make_message(Word word, std::span<const std::byte> body = {}, std::vector<int> descriptors = {});

/// The maximum payload of one rank's part, in bytes.
inline constexpr std::size_t longest_part = 4096;
/// Describes the two sides of a connection. parse_head() uses it to reject a message before memory is allocated for its
/// body.
struct MessageLimits {
  int size = 1;           ///< number of ranks in the group
  bool is_root = false;   ///< the receiver is rank 0
  bool is_known = false;  ///< the sender has sent a valid hello; other senders may only send a hello
  bool is_trunk = false;  ///< the connection may also carry the messages of ranks behind a relay
};
/// Returns the header in this machine's byte order, or nullopt if it does not begin a valid message. The input may be
/// any bytes.
std::optional<MessageHead> parse_head(MessageHead head, const MessageLimits& limits) noexcept;

/// A rank and its part of a round.
struct Member {
  int rank = 0;
  std::int64_t pid = 0;
  std::string host = {};
  std::array<std::uint8_t, 16> address = {};  ///< as rank 0 sees it (IPv6); all zeros if the rank is on rank 0's host
  std::vector<std::byte> payload = {};
  std::vector<os::Fd> descriptors = {};
};
/// encode() returns the body of Word::all with the parts of `ranks`, and decode() parses it. `members` and
/// `descriptors` have all ranks. Only the first round includes pid, host and address. The input of decode() may be any
/// bytes; it returns nullopt if they are not the parts of `ranks`.
std::vector<std::byte> encode(std::span<const Member> members, std::span<const std::uint32_t> descriptors,
                              std::span<const int> ranks, bool is_first);
std::optional<std::vector<Member>> decode(Message& message, std::span<const int> ranks, bool is_first);

/// The body of Word::line_ended.
struct LineEnd {
  std::uint32_t line = 0;
  std::uint32_t is_garbage = 0;  ///< 1 if the rank sent bytes that are not a message
  std::array<char, 120> words{};
};
static_assert(sizeof(LineEnd) == 128);
/// The body of Word::relay_card.
struct RelayCard {
  Hello relay;
  std::array<std::uint8_t, 16> root{};  ///< the address (IPv6) at which the relay has reached rank 0; zeros: not yet
  std::array<char, 240> reason{};       ///< why the last attempt to reach rank 0 has failed; may be empty
};
static_assert(sizeof(RelayCard) == 512);

/// A relay may have this many lines more than there are ranks: of ranks that have connected again, and of strangers.
inline constexpr std::size_t most_other_lines = 64;
/// A message that a relay passes on. On the trunk, a head and the numbers of the lines precede it. Line 0 is the relay
/// itself; it gives other numbers to the ranks behind it.
struct Carried {
  std::vector<std::uint32_t> lines;
  std::span<const std::byte> bytes;  ///< the message, with its head
};
/// Returns the bytes that precede `message` on the trunk. `message` has no descriptors.
OutgoingPointer carrier_of(std::span<const std::uint32_t> lines, const OutgoingMessage& message);
/// Takes the body of Word::through apart; the result refers to it. The input may be any bytes. Returns nullopt if it
/// does not name 1 to `most_lines` lines.
std::optional<Carried> parse_carried(std::span<const std::byte> body, std::size_t most_lines);
/// Returns the message, or nullopt if the bytes are not exactly one message within the limits.
std::optional<Message> parse_whole(std::span<const std::byte> bytes, const MessageLimits& limits);
/// Returns the value in the body of a received message. parse_head() has checked its length.
template <class Value>
Value body_of(const Message& message) {
  Value value;
  std::memcpy(&value, message.body.data(), std::min(message.body.size(), sizeof value));
  return value;
}

/// failure_message() makes the message Word::failure, and failure_of() parses its body.
OutgoingPointer failure_message(const Error& cause);
Error failure_of(const Message& message);

}  // namespace muster::rendezvous
