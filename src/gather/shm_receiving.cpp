// SPDX-License-Identifier: Apache-2.0
#include "src/gather/shm_receiving.hpp"

#define XXH_INLINE_ALL
#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "src/core/descriptor.hpp"
#include "src/gather/opening.hpp"

namespace muster::gather {

using core::Place;

ShmReceiving::ShmReceiving(const Call& call, ShmState& state) : call_(call), state_(state), entries_(call.list.size()) {
  forget_retired(state_);
}

void ShmReceiving::move(std::span<const Record> records, ExchangeReport& report,
                        const std::function<bool(int)>& takes) {
  std::optional<Error> failure;
  for (std::size_t position = 1; position < call_.list.size(); ++position) {
    const int sender = call_.list[position];
    const Record& record = records[static_cast<std::size_t>(sender)];
    if (!record.has_value || (takes && !takes(sender))) continue;
    std::optional<Error> trouble = attempt(*call_.group, [&] {
      const Parcel parcel = take(sender, record);
      if (!failure && parcel.is_whole) unpack(position, record, parcel, report);
    });
    if (trouble && !failure) failure = trouble->with_context(fmt::format("taking in what rank {} sent", sender));
  }
  if (failure) throw *failure;
  for (const auto& [segment, bytes] : in_use_) segment->populate_known();
}

void ShmReceiving::commit() noexcept {
  for (const auto& lease : slot_leases_) lease->arm();
  for (const auto& [segment, bytes] : in_use_) segment->note_written(bytes);
}

std::vector<std::optional<Config>> ShmReceiving::deliver() {
  slot_leases_.clear();
  return std::move(entries_);
}

ShmReceiving::Parcel ShmReceiving::take(int sender, const Record& record) {
  constexpr const char* receiving = "gather: receiving";
  constexpr std::uint64_t most_before_body = sizeof(MessageHeader) + 65536 * sizeof(ArenaEntry);
  Parcel parcel;
  parcel.message = record.complete ? written_message(sender, record)
                                   : receive_of(call_, sender, record.descriptor_bytes + most_before_body, receiving);
  MessageHeader header;
  if (parcel.message.size() < sizeof header) throw Error(ErrorKind::corrupt, "a message of a rank is too short");
  std::memcpy(&header, parcel.message.data(), sizeof header);
  const std::uint64_t before_body = sizeof header + header.arenas * sizeof(ArenaEntry);
  if (parcel.message.size() != before_body + record.descriptor_bytes)
    throw Error(ErrorKind::corrupt, "a message of a rank has not the length it announced");
  std::size_t expected = record.new_segment ? 1 : 0;
  for (std::uint32_t i = 0; i < header.arenas; ++i) expected += arena_entry(parcel, i).is_new != 0 ? 1 : 0;
  while (parcel.is_whole && parcel.segments.size() < expected) {
    Heard heard = hear(call_, sender, receiving);
    parcel.is_whole = heard.segment != 0;
    parcel.segments.push_back(std::move(heard.descriptor));
  }
  return parcel;
}

/// What stands behind the bytes of a slot. It is copied before it is judged.
std::vector<std::byte> ShmReceiving::written_message(int sender, const Record& record) const {
  const auto segment = known(sender, record.segment_id);
  const std::uint64_t begin = message_place(record.moving_bytes);
  const std::uint64_t room = segment->capacity() - std::min(begin, segment->capacity());
  MessageHeader header;
  if (room >= sizeof header) std::memcpy(&header, segment->data() + begin, sizeof header);
  const std::uint64_t bytes = sizeof header + header.arenas * sizeof(ArenaEntry) + record.descriptor_bytes;
  if (header.exchange != call_.number || bytes > room || record.descriptor_bytes > room)
    throw Error(ErrorKind::corrupt, "a slot has not the message that was announced");
  return {segment->data() + begin, segment->data() + begin + bytes};
}

ArenaEntry ShmReceiving::arena_entry(const Parcel& parcel, std::uint32_t index) {
  ArenaEntry entry;
  std::memcpy(&entry, parcel.message.data() + sizeof(MessageHeader) + index * sizeof entry, sizeof entry);
  return entry;
}

std::shared_ptr<shm::RemoteSegment> ShmReceiving::map(int sender, const os::Fd& memory) {
  auto segment = std::make_shared<shm::RemoteSegment>(memory);
  // An arena may be here already, from an exchange that failed later on: then the old mapping goes with its last
  // lease.
  state_.remotes[{sender, segment->id()}] = segment;
  return segment;
}

std::shared_ptr<shm::RemoteSegment> ShmReceiving::known(int sender, std::uint64_t id) const {
  const auto found = state_.remotes.find({sender, id});
  if (found == state_.remotes.end())
    throw Error(ErrorKind::corrupt, "the sender uses a segment that was never handed over");
  return found->second;
}

void ShmReceiving::unpack(std::size_t position, const Record& record, const Parcel& parcel, ExchangeReport& report) {
  const int sender = call_.list[position];
  MessageHeader header;
  std::memcpy(&header, parcel.message.data(), sizeof header);
  std::size_t next = 0;
  std::vector<std::shared_ptr<shm::ArenaLease>> arenas;
  for (std::uint32_t i = 0; i < header.arenas; ++i) {
    const ArenaEntry entry = arena_entry(parcel, i);
    if (entry.lease.word >= shm::lease_words) throw Error(ErrorKind::corrupt, "a lease has no place");
    auto segment = entry.is_new != 0 ? map(sender, parcel.segments[next++]) : known(sender, entry.segment);
    arenas.push_back(std::make_shared<shm::ArenaLease>(std::move(segment), entry.lease));
  }
  std::shared_ptr<shm::SlotLease> slot;
  if (record.moving_bytes != 0) {
    auto segment = record.new_segment ? map(sender, parcel.segments[next]) : known(sender, record.segment_id);
    if (record.moving_bytes > segment->capacity())
      throw Error(ErrorKind::corrupt, "more bytes than the segment has room for");
    slot = std::make_shared<shm::SlotLease>(segment, record.use);
    slot_leases_.push_back(slot);
    in_use_.emplace_back(std::move(segment), record.moving_bytes);
  }
  const auto body = std::span(parcel.message).last(record.descriptor_bytes);
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
        if (header.checks_leases != 0 && place.segment != 0) leased[place.segment - 1].emplace_back(data, bytes);
        return {TensorView(dtype, shape, data), std::move(owner)};
      });
  const RankInfo& info = call_.group->info(sender);
  for (std::uint32_t i = 0; i < header.arenas; ++i)
    if (!leased[i].empty())
      arenas[i]->watch(std::move(leased[i]), arena_entry(parcel, i).hash,
                       fmt::format("rank {} (host {}, pid {})", sender, info.host, info.pid));
}

}  // namespace muster::gather
