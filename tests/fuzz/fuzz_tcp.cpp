// SPDX-License-Identifier: Apache-2.0
// Any bytes as what comes from a network before it is known from whom: hellos, frames, cards and answers of a meeting,
// and its file. The first byte says which. Refused, or within the bounds that its reader relies on.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "muster/error.hpp"
#include "src/hosts/transport.hpp"
#include "src/tcp/frames.hpp"
#include "src/tcp/meeting_words.hpp"
#include "tests/fuzz/target.hpp"

namespace {

using namespace muster;
using namespace muster::tcp;
using muster::test::may_fail;
using muster::test::require;

constexpr int ranks = 4;
constexpr Token token{std::byte{1}};

/// The beginning of what there is.
template <class Value>
Value first_of(std::span<const std::byte> bytes) {
  Value value;
  std::memcpy(static_cast<void*>(&value), bytes.data(), std::min(bytes.size(), sizeof value));
  return value;
}

void check_frames(std::span<const std::byte> bytes, Way way) {
  for (; bytes.size() >= sizeof(Frame); bytes = bytes.subspan(sizeof(Frame))) {
    may_fail({ErrorKind::corrupt}, [&] {
      const Frame frame = parse_frame(bytes.first<sizeof(Frame)>(), way);
      require(frame.bytes_behind() <= hosts::largest_piece && frame.tag >= 0);
      require(frame.bytes_behind() == 0 || way == Way::forwards);
    });
  }
}

void check_meeting(std::span<const std::byte> bytes) {
  const CardVerdict verdict = verdict_on(first_of<Card>(bytes), token, ranks);
  require(!verdict.is_stranger || !verdict.failure);
  const auto head = first_of<AnswerHead>(bytes);
  if (!is_answer(head, ranks)) return;
  require(head.bytes <= 4096);
  if (head.kind != AnswerKind::addresses) return;
  std::vector<std::byte> body(head.bytes);
  const auto rest = bytes.subspan(std::min(bytes.size(), sizeof head));
  std::ranges::copy(rest.first(std::min(rest.size(), body.size())), body.begin());
  require(addresses_in(body, asio::ip::address_v4::loopback()).of_ranks.size() == ranks);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span bytes(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  switch (data[0] % 5) {
    case 0: {
      const auto rank = parse_hello(bytes, token, 1, ranks);
      require(!rank || (*rank >= 0 && *rank < ranks && *rank != 1));
      break;
    }
    case 1:
      check_frames(bytes, Way::forwards);
      break;
    case 2:
      check_frames(bytes, Way::backwards);
      break;
    case 3:
      check_meeting(bytes);
      break;
    default:
      if (const auto address = parse_published({reinterpret_cast<const char*>(bytes.data()), bytes.size()}))
        require(parse_published(text_of(*address)).has_value());
  }
  return 0;
}
