// SPDX-License-Identifier: Apache-2.0
#include "src/rendezvous/messages.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "muster/version.hpp"
#include "src/base/fixed_string.hpp"
#include "src/os/process.hpp"

namespace muster::rendezvous {
namespace {

using Failure = WrittenError<3072>;

constexpr std::uint32_t most_descriptors_of_a_rank = 4;

/// Precedes each part in the body of Word::all. In the first round an Identity and the host's name follow it.
struct RoundPartHead {
  std::uint32_t payload = 0;
  std::uint32_t descriptors = 0;
};
struct Identity {
  std::int64_t pid = 0;
  std::array<std::uint8_t, 16> address{};
  std::uint32_t host_bytes = 0;
  std::uint32_t reserved = 0;
};
constexpr std::size_t longest_host = 255;

template <class Value>
void append(std::vector<std::byte>& body, const Value& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  body.insert(body.end(), bytes.begin(), bytes.end());
}

class BodyReader {
 public:
  explicit BodyReader(std::span<const std::byte> left) : left_(left) {}
  /// Returns the next `count` bytes. If fewer are left, returns an empty span, and is_whole() is false from then on.
  std::span<const std::byte> bytes(std::size_t count) {
    is_whole_ = is_whole_ && count <= left_.size();
    if (!is_whole_) return {};
    const auto taken = left_.first(count);
    left_ = left_.subspan(count);
    return taken;
  }
  template <class Value>
  Value value() {
    Value value;
    if (const auto from = bytes(sizeof value); !from.empty()) std::memcpy(&value, from.data(), sizeof value);
    return value;
  }
  [[nodiscard]] bool is_whole() const { return is_whole_; }
  [[nodiscard]] bool is_at_end() const { return is_whole_ && left_.empty(); }

 private:
  std::span<const std::byte> left_;
  bool is_whole_ = true;
};

}  // namespace

Token token_of(std::string_view text) {
  XXH128_canonical_t hash;
  XXH128_canonicalFromHash(&hash, XXH3_128bits(text.data(), text.size()));
  Token token;
  static_assert(sizeof hash.digest == sizeof token);
  std::memcpy(token.data(), hash.digest, sizeof token);
  return token;
}

Hello own_hello(int rank, int size) {
  Hello hello{.rank = rank, .size = size, .pid = os::process_id()};
  put_text(hello.version, version());
  put_text(hello.host, os::host_name());
  return hello;
}

OutgoingPointer make_message(Word word, std::span<const std::byte> body, std::vector<int> descriptors) {
  const MessageHead head{
      .word = word, .descriptors = static_cast<std::uint32_t>(descriptors.size()), .bytes = body.size()};
  auto message = std::make_shared<OutgoingMessage>();
  message->bytes.resize(sizeof head + body.size());
  std::memcpy(message->bytes.data(), &head, sizeof head);
  std::ranges::copy(body, message->bytes.begin() + sizeof head);
  message->descriptors = std::move(descriptors);
  return message;
}

std::optional<MessageHead> parse_head(MessageHead head, const MessageLimits& limits) noexcept {
  if (head.magic == __builtin_bswap64(MessageHead::right_magic)) {
    head.word = static_cast<Word>(__builtin_bswap32(static_cast<std::uint32_t>(head.word)));
    head.bytes = __builtin_bswap64(head.bytes);
    head.descriptors = __builtin_bswap32(head.descriptors);
    if (head.word != Word::hello) return std::nullopt;
  } else if (head.magic != MessageHead::right_magic) {
    return std::nullopt;
  }
  const auto size = static_cast<std::uint64_t>(limits.size);
  const bool to_root = limits.is_root && limits.is_known;
  std::uint64_t least = 0;
  std::uint64_t most = 0;
  std::uint64_t descriptors = 0;
  const std::uint64_t longest_all = size * (sizeof(RoundPartHead) + sizeof(Identity) + longest_host + longest_part);
  switch (head.word) {
    case Word::hello:
      if (!limits.is_root || limits.is_known) return std::nullopt;
      least = most = sizeof(Hello);
      break;
    case Word::heard:
      if (limits.is_root) return std::nullopt;
      least = most = sizeof(Hello);
      break;
    case Word::other_job:
      if (limits.is_root) return std::nullopt;
      break;
    case Word::part:
      if (!to_root) return std::nullopt;
      most = longest_part;
      descriptors = most_descriptors_of_a_rank;
      break;
    case Word::late:
      if (!to_root) return std::nullopt;
      break;
    case Word::all:
      if (limits.is_root) return std::nullopt;
      least = sizeof(RoundPartHead);
      most = longest_all;
      descriptors = size * most_descriptors_of_a_rank;
      break;
    case Word::failure:
      if (limits.is_root && !limits.is_known) return std::nullopt;
      least = most = sizeof(Failure);
      break;
    case Word::through:
      if (!limits.is_trunk || (limits.is_root && !limits.is_known)) return std::nullopt;
      least = 2 * sizeof(std::uint32_t) + sizeof head;
      most = limits.is_root ? least + std::max(longest_part, sizeof(Failure))
                            : sizeof(std::uint32_t) * (1 + size + most_other_lines) + sizeof head +
                                  std::max(longest_all, sizeof(Failure));
      break;
    case Word::line_ended:
      if (!limits.is_trunk || !to_root) return std::nullopt;
      least = most = sizeof(LineEnd);
      break;
    case Word::relay_card:
      if (limits.is_root) return std::nullopt;
      least = most = sizeof(RelayCard);
      break;
    default:
      return std::nullopt;
  }
  if (head.bytes < least || head.bytes > most || head.descriptors > descriptors) return std::nullopt;
  return head;
}

std::vector<std::byte> encode(std::span<const Member> members, std::span<const std::uint32_t> descriptors,
                              std::span<const int> ranks, bool is_first) {
  std::vector<std::byte> body;
  for (const int rank : ranks) {
    const Member& member = members[static_cast<std::size_t>(rank)];
    append(body, RoundPartHead{static_cast<std::uint32_t>(member.payload.size()),
                               descriptors[static_cast<std::size_t>(rank)]});
    if (is_first) {
      const auto host = std::as_bytes(std::span(member.host)).first(std::min(member.host.size(), longest_host));
      append(body,
             Identity{
                 .pid = member.pid, .address = member.address, .host_bytes = static_cast<std::uint32_t>(host.size())});
      body.insert(body.end(), host.begin(), host.end());
    }
    body.insert(body.end(), member.payload.begin(), member.payload.end());
  }
  return body;
}

std::optional<std::vector<Member>> decode(Message& message, std::span<const int> ranks, bool is_first) {
  std::vector<Member> members;
  BodyReader reader(message.body);
  std::size_t descriptor = 0;
  for (const int rank : ranks) {
    if (!reader.is_whole()) break;
    const auto head = reader.value<RoundPartHead>();
    Member member{.rank = rank};
    if (is_first) {
      const auto identity = reader.value<Identity>();
      const auto host = reader.bytes(identity.host_bytes);
      member.pid = identity.pid;
      member.address = identity.address;
      member.host.assign(reinterpret_cast<const char*>(host.data()), host.size());
    }
    const auto payload = reader.bytes(head.payload);
    member.payload.assign(payload.begin(), payload.end());
    if (head.descriptors > message.descriptors.size() - descriptor) return std::nullopt;
    for (std::uint32_t i = 0; i < head.descriptors; ++i)
      member.descriptors.push_back(std::move(message.descriptors[descriptor++]));
    members.push_back(std::move(member));
  }
  if (!reader.is_at_end() || descriptor != message.descriptors.size()) return std::nullopt;
  return members;
}

OutgoingPointer carrier_of(std::span<const std::uint32_t> lines, const OutgoingMessage& message) {
  const auto count = static_cast<std::uint32_t>(lines.size());
  auto carrier = std::make_shared<OutgoingMessage>();
  append(carrier->bytes,
         MessageHead{.word = Word::through, .bytes = sizeof count + lines.size_bytes() + message.bytes.size()});
  append(carrier->bytes, count);
  const auto numbers = std::as_bytes(lines);
  carrier->bytes.insert(carrier->bytes.end(), numbers.begin(), numbers.end());
  return carrier;
}

std::optional<Carried> parse_carried(std::span<const std::byte> body, std::size_t most_lines) {
  BodyReader reader(body);
  const auto count = reader.value<std::uint32_t>();
  if (!reader.is_whole() || count == 0 || count > most_lines) return std::nullopt;
  Carried carried;
  for (std::uint32_t i = 0; i < count; ++i) carried.lines.push_back(reader.value<std::uint32_t>());
  if (!reader.is_whole()) return std::nullopt;
  carried.bytes = body.subspan(sizeof count + carried.lines.size() * sizeof count);
  return carried;
}

std::optional<Message> parse_whole(std::span<const std::byte> bytes, const MessageLimits& limits) {
  BodyReader reader(bytes);
  const auto first = reader.value<MessageHead>();
  // Ranks of one host have one byte order.
  if (!reader.is_whole() || first.magic != MessageHead::right_magic) return std::nullopt;
  const auto head = parse_head(first, limits);
  if (!head || head->descriptors != 0 || head->bytes != bytes.size() - sizeof first) return std::nullopt;
  const auto body = bytes.subspan(sizeof first);
  return Message{.word = head->word, .body = {body.begin(), body.end()}};
}

OutgoingPointer failure_message(const Error& cause) {
  Failure failure;
  failure.put(cause);
  return make_message(Word::failure, std::as_bytes(std::span(&failure, 1)));
}

Error failure_of(const Message& message) {
  Failure failure;
  std::memcpy(&failure, message.body.data(), std::min(message.body.size(), sizeof failure));
  // Another process sent the kind, so it may be out of range.
  failure.kind = std::min(failure.kind, static_cast<std::uint32_t>(ErrorKind::cancelled));
  return failure.get();
}

}  // namespace muster::rendezvous
