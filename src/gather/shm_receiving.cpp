// SPDX-License-Identifier: Apache-2.0
#include "src/gather/shm_protocol.hpp"

#define XXH_INLINE_ALL
#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "src/core/descriptor.hpp"
#include "src/gather/opening.hpp"

namespace muster::gather {

using core::Place;

void ShmReceiving::move(std::span<const Record> records, ExchangeReport& report) {
  std::optional<Error> failure;
  for (std::size_t position = 1; position < call_.list.size(); ++position) {
    const int sender = call_.list[position];
    const Record& record = records[static_cast<std::size_t>(sender)];
    if (!record.has_value) continue;
    std::optional<Error> trouble = attempt(*call_.group, [&] {
      const std::vector<std::byte> message = take(sender, record);
      if (!failure) unpack(position, record, message, report);
    });
    if (trouble && !failure) failure = trouble->with_context(fmt::format("taking in what rank {} sent", sender));
  }
  if (failure) throw *failure;
  for (const auto& [segment, bytes] : in_use_) segment->populate_known(bytes);
}

std::vector<std::byte> ShmReceiving::take(int sender, const Record& record) {
  constexpr std::uint64_t most_before_body = sizeof(MessageHeader) + 65536 * sizeof(ArenaEntry);
  if (record.complete) return written_message(sender, record);
  return receive_of(call_, sender, record.descriptor_bytes + most_before_body, "gather: receiving");
}

/// Returns the message behind the bytes of a slot. It is copied before it is validated, because the sender could change
/// it.
std::vector<std::byte> ShmReceiving::written_message(int sender, const Record& record) {
  const auto slot = segment(sender, record.segment);
  const std::uint64_t begin = message_place(record.moving_bytes);
  const std::uint64_t room = slot->capacity() - std::min(begin, slot->capacity());
  MessageHeader header;
  if (room >= sizeof header) std::memcpy(&header, slot->data() + begin, sizeof header);
  const std::uint64_t bytes = sizeof header + header.arenas * sizeof(ArenaEntry) + record.descriptor_bytes;
  if (header.exchange != call_.number || bytes > room || record.descriptor_bytes > room)
    throw Error(ErrorKind::corrupt, "a slot has not the message that was announced");
  return {slot->data() + begin, slot->data() + begin + bytes};
}

std::shared_ptr<shm::RemoteSegment> ShmReceiving::segment(int sender, std::uint64_t place, os::Access access) {
  return state_->remotes.at(*call_.group, sender, place, access);
}

void ShmReceiving::unpack(std::size_t position, const Record& record, std::span<const std::byte> message,
                          ExchangeReport& report) {
  const int sender = call_.list[position];
  MessageHeader header;
  if (message.size() < sizeof header) throw Error(ErrorKind::corrupt, "a message of a rank is too short");
  std::memcpy(&header, message.data(), sizeof header);
  // The next round delivers the sender's own error.
  if (header.is_well == 0) return;
  if (message.size() != sizeof header + header.arenas * sizeof(ArenaEntry) + record.descriptor_bytes)
    throw Error(ErrorKind::corrupt, "a message of a rank has not the length it announced");
  std::vector<ArenaEntry> entries(header.arenas);
  if (!entries.empty())
    std::memcpy(entries.data(), message.data() + sizeof header, entries.size() * sizeof(ArenaEntry));
  std::vector<std::shared_ptr<shm::Lease>> arenas;
  arenas.reserve(entries.size());
  for (const ArenaEntry& entry : entries)
    arenas.push_back(std::make_shared<shm::Lease>(segment(sender, entry.segment), entry.lease));
  std::shared_ptr<shm::Lease> slot;
  if (record.moving_bytes != 0) {
    auto moved = segment(sender, header.slot, call_.options->writable ? os::Access::read_write : os::Access::read_only);
    if (record.moving_bytes > moved->capacity())
      throw Error(ErrorKind::corrupt, "more bytes than the segment has room for");
    slot = std::make_shared<shm::Lease>(moved, header.lease);
    in_use_.emplace_back(std::move(moved), record.moving_bytes);
  }
  const auto body = message.last(record.descriptor_bytes);
  if (XXH3_64bits(body.data(), body.size()) != record.descriptor_hash)
    throw Error(ErrorKind::corrupt, "the descriptor is not the one that was announced");
  std::vector<std::vector<std::span<const std::byte>>> leased(arenas.size());
  entries_[position] =
      core::decode_descriptor(body, [&](DType dtype, const Shape& shape, std::uint64_t bytes, Place place) -> Tensor {
        const std::byte* base = nullptr;
        std::uint64_t room = 0;
        std::shared_ptr<const void> owner;
        if (place.segment == 0) {
          room = record.moving_bytes;
          if (slot) base = slot->segment().data();
          owner = slot;
        } else {
          if (place.segment > arenas.size())
            throw Error(ErrorKind::corrupt, "a tensor lies in an arena that was not handed over");
          const auto& arena = arenas[place.segment - 1];
          room = arena->segment().capacity();
          base = arena->segment().data();
          owner = arena;
          report.arena_bytes += bytes;
        }
        if (place.offset > room || bytes > room - place.offset)
          throw Error(ErrorKind::corrupt, "a tensor lies outside its segment");
        const std::byte* data = base == nullptr ? nullptr : base + place.offset;
        if (place.segment == 0 && slot && call_.options->writable)
          return {TensorView(dtype, shape, data), std::move(owner), slot->segment().mapping().data() + place.offset};
        if (header.checks_leases != 0 && place.segment != 0) leased[place.segment - 1].emplace_back(data, bytes);
        return {TensorView(dtype, shape, data), std::move(owner)};
      });
  for (std::uint32_t i = 0; i < header.arenas; ++i)
    if (!leased[i].empty())
      arenas[i]->watch(std::move(leased[i]), entries[i].hash, sync::name_of(call_.group->info(sender)));
}

}  // namespace muster::gather
