// SPDX-License-Identifier: Apache-2.0
#pragma once
// MPI as a transport: its calls, each checked once; requests and communicators with one owner, and nothing that MPI may
// still write to is ever freed.

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "src/hosts/transport.hpp"
#include "src/os/clock.hpp"

namespace muster::mpi {

using hosts::Finished;
using hosts::Found;
using hosts::Pending;

/// Throws Error(io) with MPI's own words. `what`: "sending to rank 3".
void check(int code, const char* what);

/// MPI can be used: it is initialised, not finalised, and need not rest.
bool is_running() noexcept;

/// A send was given up while MPI read tensors of the caller, who may free them now: nothing here calls MPI any more in
/// this process, because whatever lets MPI go on, in any group, lets it read what may be gone.
bool must_rest() noexcept;
/// The same, for messages.
inline constexpr const char* resting_words =
    "a wait failed while views of the program's memory were being sent, and any MPI call may still read them: Muster "
    "makes none in this process any more; end it without MPI_Finalize (tensors that own their memory stop nothing)";

/// Which threads MPI may be called from.
enum class MpiThreads : std::uint8_t {
  one,   ///< the one that made the transport (MPI_THREAD_SINGLE, FUNNELED)
  each,  ///< one at a time: whoever uses the group (MPI_THREAD_SERIALIZED)
  all,   ///< MPI_THREAD_MULTIPLE
};

class MpiTransport final : public hosts::Transport {
 public:
  static constexpr std::string_view kind_name = "mpi";

  /// Collective. Of a duplicate of the communicator that returns its errors. Throws Error(argument) if it is no
  /// communicator of a group of ranks, Error(timeout) if not all ranks come: MPI does not say which.
  static std::shared_ptr<MpiTransport> over(MPI_Comm comm, MpiThreads threads, std::chrono::milliseconds timeout);
  /// `comm` is not freed by the destructor: as long as requests may be open nobody may, and whether there are any only
  /// the context of the groups knows (src/hosts/context.hpp).
  MpiTransport(MPI_Comm comm, MpiThreads threads, int rank, int size) noexcept;

  [[nodiscard]] std::string_view kind() const noexcept override { return kind_name; }
  [[nodiscard]] std::string_view name() const noexcept override { return "MPI"; }
  /// MPI's, the same for all communicators.
  [[nodiscard]] int most_tag() const override;

  Pending send(int to, int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> keeper,
               Finished finished) override;
  Pending receive(int from, int tag, std::span<std::byte> bytes, std::shared_ptr<const void> keeper) override;
  std::unique_ptr<Found> find(int from, int tag) override;
  std::unique_ptr<Found> find_any() override;
  Pending barrier() override;
  std::vector<std::byte> tell_all(std::span<const std::byte> mine, std::chrono::milliseconds timeout) override;

  [[nodiscard]] bool may_call() const noexcept override;
  void enter() override;
  void take_over() noexcept override;
  [[nodiscard]] bool is_for_all_threads() const noexcept override { return threads_ == MpiThreads::all; }
  [[nodiscard]] bool must_rest() const noexcept override { return mpi::must_rest(); }
  void throw_if_resting() const override;

  [[nodiscard]] Error ended() const override;
  /// Gives the communicator back to MPI.
  bool close() noexcept override;
  [[nodiscard]] bool can_be_dropped() const noexcept override { return false; }
  /// MPICH 4.0 over UCX and TCP has a race in MPI_Finalize: a rank asks each other one that it has ever sent to for a
  /// disconnection and waits for its answer, but one that has had all its own answers gives no more. Who asks too late,
  /// or asks a rank that has nothing to ask of it, waits for ever: programs of ten lines hang at one end in three.
  /// Ranks answer whenever they call MPI. So where there are several hosts
  ///  - whoever sends to a rank of another host is sent to by it, too: collective operations are those whose messages
  ///    go both ways between two ranks;
  ///  - after the last barrier all leave MPI alone for a while: the last one hears of it meanwhile, and when they go on
  ///    nobody has answered before it has asked itself.
  [[nodiscard]] std::chrono::milliseconds rest(os::Clock::duration last_barrier) const noexcept override;

 private:
  [[nodiscard]] std::unique_ptr<Found> probe(int from, int tag);

  MPI_Comm comm_;
  const MpiThreads threads_;
  std::atomic<std::thread::id> thread_;
};

}  // namespace muster::mpi
