// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages of a rendezvous, the same over every transport. A message is a head, a body and, over Unix sockets, file
// descriptors. The head and the hello keep their layout in all versions, so that ranks recognize other versions.

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
  hello = 1,      ///< to rank 0: which rank this is (Hello)
  heard = 2,      ///< from rank 0: who it is (Hello); the group is not complete yet
  other_job = 3,  ///< from rank 0: it belongs to another job
  part = 4,       ///< to rank 0: this rank's part of a round
  late = 5,       ///< to rank 0: this rank's deadline has passed
  all = 6,        ///< from rank 0: the parts of all ranks
  failure = 7,    ///< in both directions: the cause that ends the rendezvous
};

struct Head {
  static constexpr std::uint64_t right_magic = 0x7461'6572'7473'756d;  // "mustreat"
  std::uint64_t magic = right_magic;
  Word word = Word::hello;
  std::uint32_t descriptors = 0;
  std::uint64_t bytes = 0;  ///< of the body
};
static_assert(sizeof(Head) == 24);

/// Identifies a job: ranks with another token are strangers.
using Token = std::array<std::byte, 16>;
Token token_of(std::string_view text);

/// Identifies a process.
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
/// This process, without the token.
Hello own_hello(int rank, int size);

/// A message that came.
struct Message {
  Word word = Word::hello;
  std::vector<std::byte> body = {};
  std::vector<os::Fd> descriptors = {};
  bool is_turned = false;  ///< a machine of the other byte order sent it
};
/// A message to be sent: its head and its body. The owner of the descriptors keeps them open until it has been sent.
struct Outgoing {
  std::vector<std::byte> bytes;
  std::vector<int> descriptors;
};
using OutgoingPointer = std::shared_ptr<const Outgoing>;
OutgoingPointer make_message(Word word, std::span<const std::byte> body = {}, std::vector<int> descriptors = {});

/// The longest part of one rank.
inline constexpr std::size_t longest_part = 4096;
/// Decides which messages are accepted, before memory is allocated for their bodies.
struct Limits {
  int size = 1;           ///< of the group
  bool is_root = false;   ///< this side is rank 0
  bool is_known = false;  ///< a rank of this job sends it; others may only send a hello
};
/// Turns the head if a machine of the other byte order wrote it. Returns nothing if no message begins like that.
/// Accepts any bytes.
std::optional<Head> parse_head(Head head, const Limits& limits) noexcept;

/// A rank, and its part of a round.
struct Member {
  int rank = 0;
  std::int64_t pid = 0;
  std::string host = {};
  std::array<std::uint8_t, 16> address = {};  ///< as rank 0 sees it (IPv6); zeros: on rank 0's host
  std::vector<std::byte> payload = {};
  std::vector<os::Fd> descriptors = {};
};
/// The body of Word::all, and back; only the first round contains the processes of the ranks. decode() accepts any
/// bytes, and returns nothing if they are not the parts of `size` ranks.
std::vector<std::byte> encode(std::span<const Member> members, std::span<const std::uint32_t> descriptors,
                              bool is_first);
std::optional<std::vector<Member>> decode(Message& message, int size, bool is_first);

/// The body of Word::failure, and back.
OutgoingPointer failure_message(const Error& cause);
Error failure_of(const Message& message);

}  // namespace muster::rendezvous
