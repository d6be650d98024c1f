// SPDX-License-Identifier: Apache-2.0
#include "src/tcp/meeting_words.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstring>
#include <span>

#include "muster/version.hpp"
#include "src/base/written.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/os/publish.hpp"

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

namespace {

constexpr std::string_view first_line = "muster meeting 1";
constexpr std::size_t longest_file = 64 << 10;
constexpr std::size_t number_digits = 32;

/// The line's rest, if it begins so.
std::optional<std::string_view> behind(std::string_view line, std::string_view begin) {
  if (!line.starts_with(begin)) return std::nullopt;
  return line.substr(begin.size());
}

bool is_number(std::string_view text) {
  return text.size() == number_digits &&
         std::ranges::all_of(text, [](unsigned char c) { return std::isxdigit(c) != 0; });
}

}  // namespace

std::optional<Endpoint> parse_endpoint(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc{} || end != digits.data() + digits.size() || port == 0) return std::nullopt;
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  error_code failure;
  const asio::ip::address address = asio::ip::make_address(std::string(host), failure);
  if (failure) return std::nullopt;
  return Endpoint(address, port);
}

std::string text_of(const PublishedAddress& address) {
  std::string text = fmt::format("{}\nnumber {}\n", first_line, address.number);
  for (const Endpoint& endpoint : address.endpoints) text += fmt::format("at {}\n", text_of(endpoint));
  return text;
}

std::optional<PublishedAddress> parse_published(std::string_view text) {
  PublishedAddress address;
  for (std::size_t line_number = 0; !text.empty(); ++line_number) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    if (line_number == 0) {
      if (line != first_line) return std::nullopt;
    } else if (line_number == 1) {
      const auto number = behind(line, "number ");
      if (!number || !is_number(*number)) return std::nullopt;
      address.number = *number;
    } else {
      const auto endpoint = parse_endpoint(behind(line, "at ").value_or(""));
      if (!endpoint) return std::nullopt;
      address.endpoints.push_back(*endpoint);
    }
  }
  return address.endpoints.empty() ? std::nullopt : std::optional(std::move(address));
}

void publish(const std::string& path, const PublishedAddress& address) {
  const std::string text = text_of(address);
  os::publish(path, std::as_bytes(std::span(text)), {});
}

std::optional<PublishedAddress> read_published(const std::string& path) {
  try {
    const std::vector<std::byte> bytes = os::read_small_file(path, longest_file);
    return parse_published({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::not_found) return std::nullopt;
    throw;
  }
}

}  // namespace muster::tcp
