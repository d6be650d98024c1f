// SPDX-License-Identifier: Apache-2.0
#pragma once
// What several ranks send to this one in pieces, all at once.
//
//  1. Each sender has a lane: its pieces in their order, some of them with a receive open.
//  2. A piece's memory is asked for when its receive is opened; where there is none yet (a window is full), the lane
//     waits and the others go on.
//  3. Pieces are reported as they come, of each lane in order. No lane waits for another one, however slow that is.
//  4. Between looking at MPI the rank does work of its own, piece by piece.
// It polls as long as pieces come and naps when they do not: MPI moves bytes only inside its calls, and what the kernel
// buffers meanwhile keeps a slow link busy, but not a fast one.

#include <chrono>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "src/mpi/mpi_group.hpp"
#include "src/shm/window_ring.hpp"

namespace muster::mpi {

using Clock = std::chrono::steady_clock;

/// Says when to go on polling: as long as something moved a moment ago.
class Eagerness {
 public:
  /// At the begin of a look that may last.
  void begin() noexcept { entered_ = Clock::now(); }
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

}  // namespace muster::mpi
