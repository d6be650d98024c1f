// SPDX-License-Identifier: Apache-2.0
// The first rank's side of the MPI route.

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "src/gather/opening.hpp"
#include "src/gather/receive_need.hpp"
#include "src/mpi/merge_rings.hpp"
#include "src/mpi/mpi_parcel.hpp"
#include "src/mpi/mpi_route.hpp"
#include "src/sync/failing.hpp"

namespace muster::mpi {

void offer_to_receive(const gather::Call& call, BufferPool& pool, gather::Record& record) {
  record.receives = true;
  const std::shared_ptr<const MergeRings> rings = merge_rings_of(*call.group);
  const std::uint64_t held = pool.bytes() + rings->bytes();
  const bool uses_rings = call.operation == gather::Operation::merge;
  record.facts[gather::fact_free] = pool.free_bytes() + (uses_rings ? rings->bytes_of(call.list) : 0);
  record.facts[gather::fact_room] = call.options->memory_budget - std::min(call.options->memory_budget, held);
  const os::MemoryHeadroom room = pool.headroom();
  record.available_bytes = room.bytes;
  record.limit = room.limit;
}

MpiReceiving::MpiReceiving(const gather::Call& call, MpiGroup& group, std::function<bool(int)> takes)
    : call_(call), group_(group), takes_(std::move(takes)), pool_(buffer_pool_of(group)) {
  parcels_.reserve(call.list.size());
}

void MpiReceiving::move(std::span<const gather::Record> records, const std::function<void()>& meanwhile,
                        ExchangeReport& report) {
  gather::Attempts attempt(group_);
  for (std::size_t position = 1; position < call_.list.size(); ++position) {
    const int sender = call_.list[position];
    if (records[static_cast<std::size_t>(sender)].has_value && takes_(sender))
      parcels_.push_back({position, sender, false, {}, {}, {}, {}});
  }
  attempt([&] { take_memory(records); });
  bool all_are_well = true;
  // Every descriptor is taken, even when one of them is bad: its sender waits for that.
  for (Parcel& parcel : parcels_)
    attempt([&] {
      all_are_well = take_descriptor(parcel, records[static_cast<std::size_t>(parcel.sender)]) && all_are_well;
    });
  for (const Parcel& parcel : parcels_)
    for (const Placed& place : parcel.places) report.mpi_bytes += place.bytes;
  const bool goes_on = all_are_well && !attempt.have_failed();
  std::optional<Inflow> inflow;
  // Where only some receives are open they would take pieces of the next exchange.
  if (goes_on)
    sync::or_fail(group_, [&] {
      std::vector<Inflow::Lane> lanes;
      for (const Parcel& parcel : parcels_) lanes.push_back({parcel.sender, parcel.pieces.size()});
      inflow.emplace(group_, lanes, static_cast<Inflow::Sink&>(*this)).open();
    });
  const std::byte word{goes_on ? std::uint8_t{1} : std::uint8_t{0}};
  for (const Parcel& parcel : parcels_)
    if (!parcel.has_given_up && records[static_cast<std::size_t>(parcel.sender)].moving_bytes > rides_along)
      group_.send(parcel.sender, std::span(&word, 1), call_.wait("gather: receiving"), Subject::exchange);
  attempt(meanwhile);
  // Even when what came by shared memory is bad: the others send, and MPI writes into this memory.
  if (inflow) inflow->run(call_.wait("gather: receiving"));
  attempt.throw_failure();
}

void MpiReceiving::take_memory(std::span<const gather::Record> records) {
  std::vector<std::uint64_t> sizes;
  sizes.reserve(parcels_.size());
  for (const Parcel& parcel : parcels_) sizes.push_back(records[static_cast<std::size_t>(parcel.sender)].moving_bytes);
  std::vector<BufferPool::Buffer> buffers = pool_->take(sizes, call_.options->pool_limit);
  for (std::size_t i = 0; i < parcels_.size(); ++i) parcels_[i].buffer = std::move(buffers[i]);
}

bool MpiReceiving::take_descriptor(Parcel& parcel, const gather::Record& record) {
  const bool rides = record.moving_bytes <= rides_along;
  const std::uint64_t expected = sizeof(ParcelHead) + record.descriptor_bytes;
  ParcelHead head;
  std::vector<std::byte> message;
  do {
    // An earlier exchange's may be longer than this one's: the group has checked its length already.
    message = group_.receive(parcel.sender, std::max<std::uint64_t>(expected, largest_piece) + rides_along,
                             call_.wait("gather: receiving"), Subject::exchange);
    if (message.size() < sizeof head) throw Error(ErrorKind::corrupt, "a message of a rank is too short");
    std::memcpy(&head, message.data(), sizeof head);
  } while (head.exchange != call_.number);
  // One that cannot send does not wait for the word, and would find it in its next exchange.
  parcel.has_given_up = head.is_well == 0;
  if (parcel.has_given_up) return false;
  const std::span<const std::byte> body = std::span(message).subspan(sizeof head);
  try {
    if (message.size() != expected + (rides ? record.moving_bytes : 0) ||
        XXH3_64bits(body.data(), record.descriptor_bytes) != record.descriptor_hash)
      throw Error(ErrorKind::corrupt, "the descriptor is not the one that was announced");
    // Where there was no memory, somebody has said so already.
    if (record.moving_bytes != 0 && !parcel.buffer.data) return true;
    parcel.config =
        take_tree(body.first(record.descriptor_bytes), record.moving_bytes, parcel.buffer.data, parcel.places);
    if (!rides)
      parcel.pieces = cut(parcel.places);
    else if (record.moving_bytes != 0)
      std::memcpy(parcel.buffer.data.get(), body.data() + record.descriptor_bytes, record.moving_bytes);
  } catch (const Error& error) {
    throw error.with_context(fmt::format("taking in what rank {} sent", parcel.sender));
  }
  return true;
}

std::span<std::byte> MpiReceiving::place(std::size_t lane, std::size_t piece) {
  const Parcel& parcel = parcels_[lane];
  const Piece& wanted = parcel.pieces[piece];
  return {parcel.buffer.data.get() + wanted.offset, wanted.bytes};
}

std::shared_ptr<const void> MpiReceiving::keeper(std::size_t lane) {
  return parcels_[lane].buffer.data;
}

void MpiReceiving::deliver(std::vector<std::optional<Config>>& entries) {
  for (Parcel& parcel : parcels_) entries[parcel.position] = std::move(parcel.config);
  parcels_.clear();
}

}  // namespace muster::mpi
