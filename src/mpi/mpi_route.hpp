// SPDX-License-Identifier: Apache-2.0
#pragma once
// The MPI route: ranks of other hosts send to the first rank by MPI, those of its own host by shared memory, in the
// same exchange.
//
//  1. offer: as the shared memory route's, but that tensors of an arena move like all others. The first rank tells what
//     its pool has and may take, so that all ranks know from the records whether there is memory (receive_need.hpp).
//  2. A sender of another host takes what it needs for packing, and sends its descriptor as a message of the group,
//     with the bytes where they are few. Else it waits for a word.
//  3. The first rank takes memory and all descriptors, opens receives for all senders, and says yes to all, or no to
//     all: then round 2 says why, and nobody sends what nobody would receive.
//  4. Each sender sends pieces (mpi_pieces.hpp) straight from its tensors, some of them under way at a time. Both know
//     the pieces from the descriptor: there are no headers.
//  5. Meanwhile the first rank takes in what came by shared memory, then waits for the pieces.
// What came is the first rank's own memory, from a pool: whoever dies, it stays. Merges: mpi_merge.hpp.

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "src/core/descriptor.hpp"
#include "src/gather/route.hpp"
#include "src/mpi/buffer_pool.hpp"
#include "src/mpi/mpi_group.hpp"
#include "src/mpi/mpi_pieces.hpp"
#include "src/mpi/mpi_tree.hpp"
#include "src/mpi/outflow.hpp"

namespace muster::mpi {

/// Whether what a sender has goes to the first rank by MPI: from other hosts, and where the route is forced from its
/// own, too.
bool goes_by_mpi(const gather::Call& call, const MpiGroup& group, int sender);

/// Step 1 on the first rank: what its pool has, and how far it may grow.
void offer_to_receive(const gather::Call& call, BufferPool& pool, gather::Record& record);

/// A sender of another host.
class MpiSending {
 public:
  MpiSending(const gather::Call& call, MpiGroup& group);
  void offer(gather::Record& record);
  void move(ExchangeReport& report);
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept { return pool_->bytes(); }

 private:
  void prepare();
  void send_descriptor(bool is_well);
  void send_pieces();

  const gather::Call& call_;
  MpiGroup& group_;
  std::shared_ptr<BufferPool> pool_;
  Outflow flow_;
  OutgoingTree tree_;
  std::vector<Piece> pieces_;
};

/// The first rank.
class MpiReceiving final : private Inflow::Sink {
 public:
  MpiReceiving(const gather::Call& call, MpiGroup& group, std::function<bool(int)> takes);
  void offer(gather::Record& record) { offer_to_receive(call_, *pool_, record); }
  /// Steps 3 to 5; `meanwhile` is what comes by shared memory.
  void move(std::span<const gather::Record> records, const std::function<void()>& meanwhile, ExchangeReport& report);
  /// Puts what came to its places among the entries.
  void deliver(std::vector<std::optional<Config>>& entries);
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept { return pool_->bytes(); }

 private:
  struct Parcel {
    std::size_t position = 0;
    int sender = 0;
    bool has_given_up = false;  // it cannot send
    BufferPool::Buffer buffer;
    std::vector<Placed> places;
    std::vector<Piece> pieces;  // none where the bytes came with the descriptor
    std::optional<Config> config;
  };
  void take_memory(std::span<const gather::Record> records);
  bool take_descriptor(Parcel& parcel, const gather::Record& record);
  std::span<std::byte> place(std::size_t lane, std::size_t piece) override;
  std::shared_ptr<const void> keeper(std::size_t lane) override;
  void arrived(std::size_t, std::size_t) override {}

  const gather::Call& call_;
  MpiGroup& group_;
  std::function<bool(int)> takes_;
  std::shared_ptr<BufferPool> pool_;
  std::vector<Parcel> parcels_;
};

std::unique_ptr<gather::RouteDriver> make_mpi_route();

}  // namespace muster::mpi
