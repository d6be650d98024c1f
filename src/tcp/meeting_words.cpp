// SPDX-License-Identifier: Apache-2.0
#include "src/tcp/meeting_words.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

#include "muster/version.hpp"
#include "src/base/written.hpp"
#include "src/os/process.hpp"

namespace muster::tcp {

Token job_token(std::string_view key, std::string_view number) {
  const std::string text = fmt::format("muster tcp {} {}", number, key);
  XXH128_canonical_t hash;
  XXH128_canonicalFromHash(&hash, XXH3_128bits(text.data(), text.size()));
  Token token;
  static_assert(sizeof hash.digest == sizeof token);
  std::memcpy(token.data(), hash.digest, sizeof token);
  return token;
}

Card own_card(int rank, int size, std::uint16_t port) {
  Card card;
  card.magic = Card::right_magic;
  put_text(card.version, version());
  card.rank = rank;
  card.size = size;
  card.pid = os::process_id();
  put_text(card.host, os::host_name());
  card.port = port;
  return card;
}

std::string where(const Card& card) {
  return fmt::format("host {}, pid {}", get_text(card.host), card.pid);
}

CardVerdict verdict_on(const Card& card, const Token& token, int size) {
  const bool is_turned = card.magic == __builtin_bswap64(Card::right_magic);
  CardVerdict verdict;
  verdict.is_of_muster = card.magic == Card::right_magic;
  verdict.is_stranger = (!verdict.is_of_muster && !is_turned) || card.token != token;
  if (verdict.is_stranger) return verdict;
  const auto fails = [&](ErrorKind kind, const std::string& words) {
    verdict.failure = Error(kind, "tcp_group: " + words, {.host = get_text(card.host)});
    return verdict;
  };
  if (is_turned)
    return fails(
        ErrorKind::version,
        fmt::format("a rank on host {} is of another byte order: tensors travel as they are in memory, so start "
                    "all ranks on machines of one byte order",
                    get_text(card.host)));
  const std::string name = fmt::format("rank {} ({})", card.rank, where(card));
  if (get_text(card.version) != version())
    return fails(ErrorKind::version, fmt::format("{} runs Muster {}, rank 0 runs {}: start all ranks with one version",
                                                 name, get_text(card.version), version()));
  if (card.size != size)
    return fails(ErrorKind::rank_mismatch,
                 fmt::format("{} says that there are {} ranks, rank 0 says {}", name, card.size, size));
  if (card.rank < 1 || card.rank >= size)
    return fails(ErrorKind::rank_mismatch, fmt::format("{} cannot be one of {} ranks that come to rank 0", name, size));
  return verdict;
}

bool is_answer(const AnswerHead& head, int size) noexcept {
  if (head.magic != AnswerHead::right_magic) return false;
  switch (head.kind) {
    case AnswerKind::heard:
    case AnswerKind::other_job:
      return head.bytes == 0;
    case AnswerKind::addresses:
      return head.bytes == sizeof(Token) + static_cast<std::size_t>(size) * sizeof(AddressEntry);
    case AnswerKind::failure:
      return head.bytes == sizeof(WrittenError<1600>);
  }
  return false;
}

AddressEntry entry_of(const asio::ip::address& from, std::uint16_t port) {
  AddressEntry entry;
  entry.port = port;
  asio::ip::address plain = from;
  if (plain.is_v6() && plain.to_v6().is_v4_mapped())
    plain = asio::ip::make_address_v4(asio::ip::v4_mapped, plain.to_v6());
  if (plain.is_loopback() || plain.is_unspecified()) return entry;
  entry.address = plain.is_v6() ? plain.to_v6().to_bytes()
                                : asio::ip::make_address_v6(asio::ip::v4_mapped, plain.to_v4()).to_bytes();
  return entry;
}

Endpoint endpoint_of(const AddressEntry& entry, const asio::ip::address& first) {
  const asio::ip::address_v6 address(entry.address);
  if (address.is_unspecified()) return {first, entry.port};
  if (address.is_v4_mapped()) return {asio::ip::make_address_v4(asio::ip::v4_mapped, address), entry.port};
  return {address, entry.port};
}

Addresses addresses_in(std::span<const std::byte> body, const asio::ip::address& first) {
  Addresses addresses;
  std::memcpy(addresses.token.data(), body.data(), sizeof addresses.token);
  for (body = body.subspan(sizeof addresses.token); !body.empty(); body = body.subspan(sizeof(AddressEntry))) {
    AddressEntry entry;
    std::memcpy(&entry, body.data(), sizeof entry);
    addresses.of_ranks.push_back(endpoint_of(entry, first));
  }
  return addresses;
}

}  // namespace muster::tcp
