// SPDX-License-Identifier: Apache-2.0
// Any bytes as network input from an unknown sender: hellos, frames, messages of a rendezvous, and its address file.
// The first byte selects the reader. It must refuse the input, or return values within the limits that its caller
// relies on.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>

#include "muster/error.hpp"
#include "src/multihost/transport.hpp"
#include "src/rendezvous/address_file.hpp"
#include "src/rendezvous/messages.hpp"
#include "src/tcp/connection.hpp"
#include "tests/fuzz/target.hpp"

namespace {

using namespace muster;
using namespace muster::tcp;
using muster::test::may_fail;
using muster::test::require;

constexpr int ranks = 4;
constexpr Token token{std::byte{1}};

/// Returns a value with the first bytes of the input.
template <class Value>
Value first_of(std::span<const std::byte> bytes) {
  Value value;
  std::memcpy(static_cast<void*>(&value), bytes.data(), std::min(bytes.size(), sizeof value));
  return value;
}

void check_frames(std::span<const std::byte> bytes, MessageKind way) {
  for (; bytes.size() >= sizeof(Frame); bytes = bytes.subspan(sizeof(Frame))) {
    may_fail({ErrorKind::corrupt}, [&] {
      const Frame frame = parse_frame(bytes.first<sizeof(Frame)>(), way);
      require(frame.bytes_behind() <= multihost::largest_piece && frame.tag >= 0);
      require(frame.bytes_behind() == 0 || way == MessageKind::forwards);
    });
  }
}

void check_rendezvous(std::span<const std::byte> bytes) {
  for (const auto& limits :
       {rendezvous::MessageLimits{ranks, true, false, false}, rendezvous::MessageLimits{ranks, true, true, false},
        rendezvous::MessageLimits{ranks, false, false, false}, rendezvous::MessageLimits{ranks, true, true, true},
        rendezvous::MessageLimits{ranks, false, false, true}}) {
    const auto head = rendezvous::parse_head(first_of<rendezvous::MessageHead>(bytes), limits);
    if (!head) continue;
    require(head->bytes <= ranks * (rendezvous::longest_part + 1024) && head->descriptors <= 4 * ranks);
    rendezvous::Message message{.word = head->word, .body = std::vector<std::byte>(head->bytes)};
    const auto rest = bytes.subspan(std::min(bytes.size(), sizeof(rendezvous::MessageHead)));
    std::ranges::copy(rest.first(std::min(rest.size(), message.body.size())), message.body.begin());
    if (head->word == rendezvous::Word::through) {
      require(limits.is_trunk);
      const auto carried = rendezvous::parse_carried(message.body, ranks);
      if (!carried) continue;
      require(!carried->lines.empty() && carried->lines.size() <= ranks);
      rendezvous::MessageLimits inner_limits = limits;
      inner_limits.is_trunk = false;
      const auto inner = rendezvous::parse_whole(carried->bytes, inner_limits);
      require(!inner || (inner->body.size() < carried->bytes.size() && inner->word != rendezvous::Word::through));
    }
    if (head->word != rendezvous::Word::all) continue;
    std::array<int, ranks> all_ranks{};
    std::iota(all_ranks.begin(), all_ranks.end(), 0);
    for (const bool is_first : {true, false})
      if (const auto members = rendezvous::decode(message, all_ranks, is_first)) require(members->size() == ranks);
  }
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
      check_frames(bytes, MessageKind::forwards);
      break;
    case 2:
      check_frames(bytes, MessageKind::backwards);
      break;
    case 3:
      check_rendezvous(bytes);
      break;
    default:
      if (const auto address = parse_published({reinterpret_cast<const char*>(bytes.data()), bytes.size()}))
        require(parse_published(text_of(*address)).has_value());
  }
  return 0;
}
