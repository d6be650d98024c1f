// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages of a rendezvous. They are the same over every transport: a header (Head), a body and, over Unix sockets,
// file descriptors. The layouts of Head and Hello never change, so that a rank recognizes a rank of another version.

#include <array>
#include <cstddef>
#include <cstdint>
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
  all = 6,        ///< from rank 0: the parts of all ranks
  failure = 7,    ///< in both directions: the cause that ends the rendezvous
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
  std::array<std::byte, 72> reserved{};
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
/// encode() returns the body of Word::all, and decode() parses it. Only the first round includes pid, host and address.
/// The input of decode() may be any bytes; it returns nullopt if they are not the parts of `size` ranks.
std::vector<std::byte> encode(std::span<const Member> members, std::span<const std::uint32_t> descriptors,
                              bool is_first);
std::optional<std::vector<Member>> decode(Message& message, int size, bool is_first);

/// failure_message() makes the message Word::failure, and failure_of() parses its body.
OutgoingPointer failure_message(const Error& cause);
Error failure_of(const Message& message);

}  // namespace muster::rendezvous
