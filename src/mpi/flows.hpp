// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pieces between ranks: what several send to this one, all at once (Inflow), and what this one sends to another
// (Outflow).
//
//  1. Each sender has a lane: its pieces in their order, some of them with a receive open.
//  2. A piece's memory is asked for when its receive is opened; where there is none yet (a window is full), the lane
//     waits and the others go on.
//  3. Pieces are reported as they come, of each lane in order. No lane waits for another one, however slow that is.
//  4. Between looking at MPI the rank does work of its own, piece by piece.
// Both poll as long as pieces come or go and nap when they do not: MPI moves bytes only inside its calls, and what the
// kernel buffers meanwhile keeps a slow link busy, but not a fast one.

#include <chrono>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "src/mpi/buffer_pool.hpp"
#include "src/mpi/mpi_group.hpp"
#include "src/mpi/mpi_tree.hpp"
#include "src/shm/window_ring.hpp"

namespace muster::mpi {

using Clock = std::chrono::steady_clock;

/// Says when to go on polling: as long as something moved a moment ago.
class Eagerness {
 public:
  /// At the begin of a look that may last.
  void begin() noexcept { entered_ = Clock::now(); }
  /// Something was begun.
  void note() noexcept { moved_ = Clock::now(); }
  /// Whether to look again at once.
  bool again(bool has_moved) noexcept;

 private:
  Clock::time_point moved_ = Clock::now();
  Clock::time_point entered_ = moved_;
};

class Inflow {
 public:
  struct Lane {
    int sender = 0;
    std::size_t pieces = 0;
    /// Where the sender shares this rank's memory: a ring of windows that it writes its pieces to, in turns from `turn`
    /// on, instead of sending them. The sink releases them.
    const shm::WindowRing* ring = nullptr;
    std::uint32_t turn = 0;
  };
  /// Whose pieces they are. `lane`: its index.
  class Sink {
   public:
    virtual ~Sink() = default;
    /// Whether there is room for this piece, so that it is awaited.
    [[nodiscard]] virtual bool takes(std::size_t /*lane*/, std::size_t /*piece*/) const { return true; }
    /// Memory of exactly the piece's bytes; empty: not yet.
    virtual std::span<std::byte> place(std::size_t lane, std::size_t piece) = 0;
    /// What keeps that memory until MPI has let go of it.
    virtual std::shared_ptr<const void> keeper(std::size_t lane) = 0;
    virtual void arrived(std::size_t lane, std::size_t piece) = 0;
    /// Some of this rank's own work; false where there is none (now).
    virtual bool work() { return false; }
    [[nodiscard]] virtual bool has_work_left() const { return false; }
  };

  Inflow(MpiGroup& group, const std::vector<Lane>& lanes, Sink& sink);
  /// Opens the first receives: before the senders are told to send, so that nothing comes unexpected.
  void open();
  /// Until all pieces have come and the sink has no work left. Throws as SyncGroup::receive; then MPI may still write
  /// into memory that keepers keep.
  void run(const WaitOptions& wait);

 private:
  struct State {
    Lane lane;
    std::size_t next = 0;  // piece to open
    std::size_t done = 0;
    std::size_t done_before = 0;  // at the begin of a wait
    std::deque<Pending> open;
    Clock::time_point moved{};  // or began to wait
  };
  void take_all(const WaitOptions& wait);
  [[nodiscard]] bool is_awaited(std::size_t index) const;
  bool open(std::size_t index);
  /// Looks once at every lane; true where something moved.
  bool look();
  /// Of ranks on this host: those that died or stand still.
  void look_at_neighbours(const WaitOptions& wait);

  MpiGroup& group_;
  Sink& sink_;
  std::deque<State> states_;
  std::vector<std::size_t> unfinished_;
  Eagerness eagerness_;
  Clock::time_point looked_ = Clock::now();
};

/// Some messages under way at a time: straight from where they are, or from buffers that are used again.
class Outflow {
 public:
  Outflow(MpiGroup& group, int to) : group_(group), waits_(&group), to_(to) {}
  /// From now on its waits are those of another group; its messages stay the first one's.
  void wait_by(MpiGroup& group) noexcept { waits_ = &group; }
  /// Takes buffers for `pieces` packed pieces of at most `bytes` each, fewer where they take turns: before the receiver
  /// is promised anything. Throws Error(no_space).
  void prepare(BufferPool& pool, std::size_t pieces, std::uint64_t bytes, std::uint64_t pool_limit);
  /// For those of a tree's pieces that have to be packed.
  void prepare(BufferPool& pool, const OutgoingTree& tree, const std::vector<Piece>& pieces, std::uint64_t pool_limit);
  /// A prepared buffer that MPI does not read; waits for one. What it returns goes to send() as the keeper, too.
  std::shared_ptr<std::byte> buffer(const WaitOptions& wait);
  /// `bytes` stay until finish() has returned; `keeper` keeps them beyond that, where MPI never lets go. `tag`: which
  /// of the routes' own.
  void send(std::span<const std::byte> bytes, std::shared_ptr<const void> keeper, const WaitOptions& wait, int tag = 0);
  void send(const OutgoingTree& tree, const Piece& piece, const WaitOptions& wait);
  /// Until all has been sent. Throws, like all here, as SyncGroup::send; MPI may then still read what was under way.
  void finish(const WaitOptions& wait);

 private:
  void drain(std::size_t most, const WaitOptions& wait);

  MpiGroup& group_;
  MpiGroup* waits_;
  int to_;
  std::vector<BufferPool::Buffer> buffers_;
  std::deque<Pending> under_way_;
  Eagerness eagerness_;
};

}  // namespace muster::mpi
