// SPDX-License-Identifier: Apache-2.0
// The MPI route: ranks of other hosts send to the first rank by MPI, those of its own host by shared memory, in the
// same exchange.
//
//  1. offer: as the shared memory route's, but that tensors of an arena move like all others. The first rank tells what
//     its pool has and may take, so that all ranks know from the records whether there is memory (receive_need.hpp).
//  2. A sender of another host takes what it needs for packing, and sends its descriptor as a message of the group,
//     with the bytes where they are few. Else it waits for a word.
//  3. The first rank takes memory and all descriptors, opens receives for all senders, and says yes to all, or no to
//     all: then round 2 says why, and nobody sends what nobody would receive.
//  4. Each sender sends pieces (mpi_tree.hpp) straight from its tensors, some of them under way at a time. Both know
//     the pieces from the descriptor: there are no headers.
//  5. Meanwhile the first rank takes in what came by shared memory, then waits for the pieces.
// What came is the first rank's own memory, from a pool: whoever dies, it stays. Merges: mpi_merge.cpp; streams:
// part_stream.hpp.

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>

#include "src/gather/merge_record.hpp"
#include "src/gather/opening.hpp"
#include "src/gather/receive_need.hpp"
#include "src/gather/route.hpp"
#include "src/gather/shm_protocol.hpp"
#include "src/mpi/merge_rings.hpp"
#include "src/mpi/mpi_route.hpp"
#include "src/mpi/part_stream.hpp"
#include "src/sync/failing.hpp"

namespace muster::mpi {

bool goes_by_mpi(const gather::Call& call, const MpiGroup& group, int sender) {
  return call.forced == Route::mpi || group.host_of(sender) != group.host_of(call.first());
}

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

namespace {

using gather::Call;
using gather::Operation;
using gather::Record;

/// A sender of another host.
class MpiSending {
 public:
  MpiSending(const Call& call, MpiGroup& group) : call_(call), group_(group), flow_(group, call.first()) {}

  void offer(Record& record) { tree_ = OutgoingTree(*call_.value, record); }

  void move(ExchangeReport& report) {
    for (const Placed& place : tree_.places()) report.mpi_bytes += place.bytes;
    try {
      prepare();
      send_descriptor(true);
    } catch (...) {
      // What the group failed with, all ranks know.
      if (!group_.failure()) send_descriptor(false);
      throw;
    }
    if (tree_.bytes() <= rides_along) return;
    const std::vector<std::byte> word = group_.receive(call_.first(), 1, wait_, Subject::exchange);
    if (word.size() == 1 && word.front() != std::byte{0})
      sync::or_fail(group_, [&] {
        for (const Piece& piece : pieces_) flow_.send(tree_, piece, wait_);
        flow_.finish(wait_);
      });
  }

 private:
  void prepare() {
    if (call_.stage) {
      call_.stage();
      Record same;
      tree_ = OutgoingTree(*call_.value, same);
    }
    if (tree_.bytes() <= rides_along) return;
    pieces_ = cut(tree_.places());
    flow_.prepare(*buffer_pool_of(group_), tree_, pieces_, call_.options->pool_limit);
  }

  void send_descriptor(bool is_well) {
    const ParcelHead head{call_.number, is_well ? 1U : 0U, 0};
    const auto front = std::as_bytes(std::span(&head, 1));
    const std::vector<std::byte> message =
        is_well ? tree_.message(front, tree_.bytes() <= rides_along) : std::vector(front.begin(), front.end());
    group_.send(call_.first(), message, wait_, Subject::exchange);
  }

  const Call& call_;
  MpiGroup& group_;
  WaitOptions wait_ = call_.wait("gather: sending");
  Outflow flow_;
  OutgoingTree tree_;
  std::vector<Piece> pieces_;
};

/// The first rank.
class MpiReceiving final : private Inflow::Sink {
 public:
  MpiReceiving(const Call& call, MpiGroup& group) : call_(call), group_(group) { parcels_.reserve(call.list.size()); }
  /// Steps 3 to 5; `meanwhile` is what comes by shared memory.
  void move(std::span<const Record> records, const std::function<void()>& meanwhile, ExchangeReport& report);
  /// Puts what came to its places among the entries.
  void deliver(std::vector<std::optional<Config>>& entries) {
    for (Parcel& parcel : parcels_) entries[parcel.position] = std::move(parcel.tree.config);
    parcels_.clear();
  }

 private:
  struct Parcel {
    std::size_t position = 0;
    int sender = 0;
    bool has_given_up = false;  // it cannot send
    BufferPool::Buffer buffer;
    IncomingTree tree;
  };
  void take_memory(std::span<const Record> records);
  bool take_descriptor(Parcel& parcel, const Record& record);
  std::span<std::byte> place(std::size_t lane, std::size_t piece) override {
    const Piece& wanted = parcels_[lane].tree.pieces[piece];
    return {parcels_[lane].buffer.data.get() + wanted.offset, wanted.bytes};
  }
  std::shared_ptr<const void> keeper(std::size_t lane) override { return parcels_[lane].buffer.data; }
  void arrived(std::size_t, std::size_t) override {}

  const Call& call_;
  MpiGroup& group_;
  WaitOptions wait_ = call_.wait("gather: receiving");
  std::vector<Parcel> parcels_;
};

void MpiReceiving::move(std::span<const Record> records, const std::function<void()>& meanwhile,
                        ExchangeReport& report) {
  gather::Attempts attempt(group_);
  for (std::size_t position = 1; position < call_.list.size(); ++position) {
    const int sender = call_.list[position];
    if (records[static_cast<std::size_t>(sender)].has_value && goes_by_mpi(call_, group_, sender))
      parcels_.push_back({position, sender, false, {}, {}});
  }
  attempt([&] { take_memory(records); });
  bool all_are_well = true;
  // Every descriptor is taken, even when one of them is bad: its sender waits for that.
  for (Parcel& parcel : parcels_)
    attempt([&] {
      all_are_well = take_descriptor(parcel, records[static_cast<std::size_t>(parcel.sender)]) && all_are_well;
    });
  for (const Parcel& parcel : parcels_) report.mpi_bytes += parcel.tree.tensor_bytes;
  const bool goes_on = all_are_well && !attempt.have_failed();
  std::optional<Inflow> inflow;
  // Where only some receives are open they would take pieces of the next exchange.
  if (goes_on)
    sync::or_fail(group_, [&] {
      std::vector<Inflow::Lane> lanes;
      for (const Parcel& parcel : parcels_) lanes.push_back({parcel.sender, parcel.tree.pieces.size()});
      inflow.emplace(group_, lanes, static_cast<Inflow::Sink&>(*this)).open();
    });
  const std::byte word{goes_on ? std::uint8_t{1} : std::uint8_t{0}};
  for (const Parcel& parcel : parcels_)
    if (!parcel.has_given_up && records[static_cast<std::size_t>(parcel.sender)].moving_bytes > rides_along)
      group_.send(parcel.sender, std::span(&word, 1), wait_, Subject::exchange);
  attempt(meanwhile);
  // Even when what came by shared memory is bad: the others send, and MPI writes into this memory.
  if (inflow) inflow->run(wait_);
  attempt.throw_failure();
}

void MpiReceiving::take_memory(std::span<const Record> records) {
  std::vector<std::uint64_t> sizes;
  sizes.reserve(parcels_.size());
  for (const Parcel& parcel : parcels_) sizes.push_back(records[static_cast<std::size_t>(parcel.sender)].moving_bytes);
  std::vector<BufferPool::Buffer> buffers = buffer_pool_of(group_)->take(sizes, call_.options->pool_limit);
  for (std::size_t i = 0; i < parcels_.size(); ++i) parcels_[i].buffer = std::move(buffers[i]);
}

bool MpiReceiving::take_descriptor(Parcel& parcel, const Record& record) {
  const bool rides = record.moving_bytes <= rides_along;
  const std::uint64_t expected = sizeof(ParcelHead) + record.descriptor_bytes;
  // An earlier exchange's may be longer than this one's: the group has checked its length already.
  const std::uint64_t most = std::max<std::uint64_t>(expected, largest_piece) + rides_along;
  const std::vector<std::byte> message = gather::receive_of(call_, parcel.sender, most, wait_.phase);
  ParcelHead head;
  if (message.size() < sizeof head) throw Error(ErrorKind::corrupt, "a message of a rank is too short");
  std::memcpy(&head, message.data(), sizeof head);
  // One that cannot send does not wait for the word, and would find it in its next exchange.
  parcel.has_given_up = head.is_well == 0;
  if (parcel.has_given_up) return false;
  const std::span<const std::byte> body = std::span(message).subspan(sizeof head);
  if (message.size() != expected + (rides ? record.moving_bytes : 0) ||
      XXH3_64bits(body.data(), record.descriptor_bytes) != record.descriptor_hash)
    throw Error(ErrorKind::corrupt,
                fmt::format("the descriptor that rank {} sent is not the one that it announced", parcel.sender));
  // Where there was no memory, somebody has said so already.
  if (record.moving_bytes != 0 && !parcel.buffer.data) return true;
  parcel.tree = take_tree(parcel.sender, body.first(record.descriptor_bytes), record.moving_bytes, parcel.buffer.data,
                          body.subspan(record.descriptor_bytes));
  return true;
}

class MpiTransfer final : public gather::Transfer {
 public:
  MpiTransfer(const Call& call, MpiGroup& group) : call_(call), group_(group) {
    const bool has_shm = group.region_of(group.rank()) != nullptr;
    if (has_shm) shm_ = gather::shm_state_of(*call.group);
    if (call_.is_first()) {
      receiving_.emplace(call_, group_);
      if (shm_) shm_receiving_.emplace(call_, *shm_);
      return;
    }
    if (!call_.is_sender() || call_.value == nullptr) return;
    if (goes_by_mpi(call_, group_, group_.rank()))
      sending_.emplace(call_, group_);
    else
      shm_sending_.emplace(call_, *shm_);
  }

  void offer(Record& record) override {
    if (sending_) sending_->offer(record);
    if (shm_sending_) shm_sending_->offer(record);
    if (receiving_) offer_to_receive(call_, *buffer_pool_of(group_), record);
  }
  void move(std::span<const Record> records, ExchangeReport& report) override {
    if (sending_) sending_->move(report);
    if (shm_sending_) shm_sending_->move(report);
    if (!receiving_) return;
    receiving_->move(
        records,
        [&] {
          if (shm_receiving_)
            shm_receiving_->move(records, report, [this](int rank) { return !goes_by_mpi(call_, group_, rank); });
        },
        report);
  }
  void commit() noexcept override {
    if (shm_sending_) shm_sending_->commit();
    if (shm_receiving_) shm_receiving_->commit();
  }
  std::vector<std::optional<Config>> deliver() override {
    std::vector<std::optional<Config>> entries(call_.list.size());
    if (shm_receiving_) entries = shm_receiving_->deliver();
    if (receiving_) receiving_->deliver(entries);
    return entries;
  }
  std::vector<std::unique_ptr<gather::Obligation>> obligations() override {
    return shm_sending_ ? shm_sending_->obligations() : std::vector<std::unique_ptr<gather::Obligation>>{};
  }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override {
    return (shm_ ? shm_->pool.bytes() : 0) + buffer_pool_of(group_)->bytes();
  }

 private:
  const Call& call_;
  MpiGroup& group_;
  std::shared_ptr<gather::ShmState> shm_;
  std::optional<MpiSending> sending_;
  std::optional<MpiReceiving> receiving_;
  std::optional<gather::ShmSending> shm_sending_;
  std::optional<gather::ShmReceiving> shm_receiving_;
};

class MpiRoute final : public gather::RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::mpi; }
  [[nodiscard]] bool is_usable(const Call& call) const override {
    return dynamic_cast<const MpiGroup*>(call.group) != nullptr;
  }
  [[nodiscard]] std::string obstacle(const Call& call) const override {
    return fmt::format(
        "the group is of kind '{}': make it with mpi_group(), or start the ranks with mpiexec and use "
        "world()",
        call.group->kind());
  }
  [[nodiscard]] std::string reason(const Call&) const override {
    return "the ranks of the list are on several hosts: MPI between them, shared memory on the first rank's";
  }
  std::unique_ptr<gather::Transfer> begin(const Call& call) const override {
    auto& group = dynamic_cast<MpiGroup&>(*call.group);
    if (call.operation != Operation::merge) return std::make_unique<MpiTransfer>(call, group);
    if (!gather::merge_moves(gather::merge_number(*call.merge)) || call.list.size() == 1)
      return gather::make_unmoved_merge(call);
    return make_mpi_merge(call, group);
  }
  std::unique_ptr<gather::PartOutlet> open_outlet(const Call& call) const override {
    auto& group = dynamic_cast<MpiGroup&>(*call.group);
    if (!call.is_sender() || !goes_by_mpi(call, group, group.rank())) return nullptr;
    return std::make_unique<MpiOutlet>(call, group);
  }
  std::unique_ptr<gather::PartInlet> open_inlet(const Call& call, std::uint64_t part_bytes) const override {
    return std::make_unique<MpiInlet>(call, dynamic_cast<MpiGroup&>(*call.group), part_bytes);
  }
  [[nodiscard]] bool receives_into_own() const noexcept override { return true; }
  // Bytes that go to another host move, wherever they are.
  [[nodiscard]] bool moves(const TensorView&) const override { return true; }
  std::uint64_t settle(SyncGroup& group, Keep keep) const override {
    const std::uint64_t kept = buffer_pool_of(group)->settle();
    return keep == Keep::nothing ? kept - buffer_pool_of(group)->trim(0) : kept;
  }
  std::uint64_t trim(SyncGroup& group) const override {
    return buffer_pool_of(group)->trim(0) + merge_rings_of(group)->trim();
  }
  void clean_up(SyncGroup&) const noexcept override {}
};

// A program that has this library has the route: it stands behind those that every program has.
const bool is_registered = [] {
  gather::RouteTable::instance().add(std::make_unique<MpiRoute>());
  return true;
}();

}  // namespace
}  // namespace muster::mpi
