// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ranks say to rank 0 at a meeting (tcp_group.cpp), what it answers, and the file that tells where it listens. The
// beginning of a card stays the same in all versions.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "src/tcp/sockets.hpp"
#include "src/tcp/tcp_transport.hpp"

namespace muster::tcp {

/// Of a job's key and the number of a published meeting (empty: it is not published). The same in all versions.
Token job_token(std::string_view key, std::string_view number);

/// Who a rank is.
struct Card {
  static constexpr std::uint64_t right_magic = 0x6472'6163'7473'756d;  // "mustcard"
  std::uint64_t magic = 0;
  Token token{};
  std::array<char, 24> version{};
  std::int32_t rank = -1;
  std::int32_t size = 0;
  std::int64_t pid = 0;
  std::array<char, 64> host{};
  std::uint16_t port = 0;  ///< that it listens at
  std::array<std::byte, 126> reserved{};
};
static_assert(sizeof(Card) == 256, "ranks of other versions have to understand that they are");

/// This process's, but for the token.
Card own_card(int rank, int size, std::uint16_t port);
/// "host a, pid 7"
std::string where(const Card& card);

struct CardVerdict {
  bool is_stranger = false;  ///< of no rank of this job; nothing else of the card means anything
  bool is_of_muster = false;
  std::optional<Error> failure = {};  ///< of the job: it cannot be a rank of it
};
/// Any bytes.
CardVerdict verdict_on(const Card& card, const Token& token, int size);

enum class AnswerKind : std::uint32_t {
  heard = 1,      ///< another answer follows when all have come
  other_job = 2,  ///< nothing follows
  addresses = 3,  ///< the token of the ranks, and an AddressEntry of each
  failure = 4,    ///< a WrittenError<1600>
};

/// Begins an answer; `bytes` follow.
struct AnswerHead {
  static constexpr std::uint64_t right_magic = 0x7277'736e'7473'756d;  // "mustnswr"
  std::uint64_t magic = right_magic;
  AnswerKind kind = AnswerKind::heard;
  std::uint32_t bytes = 0;
};
static_assert(sizeof(AnswerHead) == 16);
/// Whether it is one that rank 0 of so many ranks gives. Any bytes.
bool is_answer(const AnswerHead& head, int size) noexcept;

struct AddressEntry {
  std::array<std::uint8_t, 16> address{};  ///< of IPv6, which has IPv4's in it; all zero: where rank 0 is
  std::uint16_t port = 0;
  std::array<std::uint8_t, 6> reserved{};
};
static_assert(sizeof(AddressEntry) == 24);

/// `from`: as rank 0 has seen it.
AddressEntry entry_of(const asio::ip::address& from, std::uint16_t port);
/// `first`: where this rank has reached rank 0.
Endpoint endpoint_of(const AddressEntry& entry, const asio::ip::address& first);
/// Of an answer's body, of a length that is_answer() has seen.
Addresses addresses_in(std::span<const std::byte> body, const asio::ip::address& first);

/// Where rank 0 of a meeting listens, in a file that all hosts see. Lines of text:
///
///   muster meeting 1
///   number HEXADECIMAL
///   at ADDRESS:PORT           one a line, the one to be tried first in front
struct PublishedAddress {
  std::string number;  ///< of the meeting: no other has it
  std::vector<Endpoint> endpoints;
};

/// "HOST:PORT" of numbers; none of what is not.
std::optional<Endpoint> parse_endpoint(std::string_view text);

std::string text_of(const PublishedAddress& address);
/// None of what is no such file. Any bytes.
std::optional<PublishedAddress> parse_published(std::string_view text);

/// In place of what an earlier meeting has left. Throws Error(io | no_space | not_found).
void publish(const std::string& path, const PublishedAddress& address);
/// None if it is not there yet, or none. Throws Error(io).
std::optional<PublishedAddress> read_published(const std::string& path);

}  // namespace muster::tcp
