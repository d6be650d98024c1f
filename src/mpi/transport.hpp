// SPDX-License-Identifier: Apache-2.0
#pragma once
// The MPI transport. Each call of MPI is checked in one place, and requests and communicators have one owner. Memory to
// which MPI may still write is never freed.

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "src/multihost/transport.hpp"
#include "src/os/clock.hpp"

namespace muster::mpi {

using multihost::ArrivedMessage;
using multihost::PendingTransfer;
using multihost::SendEnd;

/// Throws Error(io) with the error message of MPI. `what` describes the operation: "sending to rank 3".
void check(int code, const char* what);

/// Returns whether MPI can be used: it is initialised, is not finalised, and need not rest.
bool is_running() noexcept;

/// Returns whether a send was given up while MPI was reading tensors of the caller, who may free them now. Muster then
/// makes no MPI call in this process any more. Any call, in any group, would advance MPI and let it read memory that
/// may have been freed.
bool must_rest() noexcept;
/// The same reason as text for error messages.
inline constexpr const char* resting_words =
    "MPI: using it after a failed wait: views of the program's memory were being sent, and any MPI call may still read "
    "them. End the process without MPI_Finalize (Muster makes no MPI call in it), or use tensors that own their memory";

/// The threads from which MPI may be called.
enum class MpiThreads : std::uint8_t {
  one,   ///< the thread that made the transport (MPI_THREAD_SINGLE, FUNNELED)
  each,  ///< one thread at a time: the thread that uses the group (MPI_THREAD_SERIALIZED)
  all,   ///< MPI_THREAD_MULTIPLE
};

class MpiTransport final : public multihost::Transport {
 public:
  static constexpr std::string_view kind_name = "mpi";

  /// Makes a transport over a duplicate of the communicator, which returns its errors. Collective. Throws
  /// Error(invalid_argument) if `comm` is not a communicator of one group of ranks. Throws Error(timeout) if not all
  /// ranks call it; MPI does not report which ones are missing.
  static std::shared_ptr<MpiTransport> over(MPI_Comm comm, MpiThreads threads, std::chrono::milliseconds timeout);
  /// The destructor does not free `comm`. It must not be freed while requests may be open, and only the context of the
  /// groups knows that (src/multihost/context.hpp).
  MpiTransport(MPI_Comm comm, MpiThreads threads, int rank, int size) noexcept;

  [[nodiscard]] std::string_view kind() const noexcept override { return kind_name; }
  [[nodiscard]] std::string_view name() const noexcept override { return "MPI"; }
  /// The limit of MPI, which is the same for all communicators.
  [[nodiscard]] int most_tag() const override;
  [[nodiscard]] bool agrees_on_long_messages() const noexcept override { return true; }

  PendingTransfer send(int to, int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> keeper,
                       SendEnd finished) override;
  PendingTransfer receive(int from, int tag, std::span<std::byte> bytes, std::shared_ptr<const void> keeper) override;
  std::unique_ptr<ArrivedMessage> find(int from, int tag) override;
  std::unique_ptr<ArrivedMessage> find_any() override;
  PendingTransfer barrier() override;
  std::vector<std::byte> tell_all(std::span<const std::byte> mine, std::chrono::milliseconds timeout) override;

  [[nodiscard]] bool may_call() const noexcept override;
  void enter() override;
  void take_over() noexcept override;
  [[nodiscard]] bool is_for_all_threads() const noexcept override { return threads_ == MpiThreads::all; }
  [[nodiscard]] bool must_rest() const noexcept override { return mpi::must_rest(); }
  void throw_if_resting() const override;

  [[nodiscard]] Error ended() const override;
  /// Returns the communicator to MPI.
  bool close() noexcept override;
  [[nodiscard]] bool can_be_dropped() const noexcept override { return false; }
  /// MPICH 4.0 over UCX and TCP has a race in MPI_Finalize. Each rank requests a disconnection from every rank to which
  /// it has ever sent, and waits for the answer. But a rank that has received all its own answers stops answering. A
  /// rank that requests too late, or that sends requests to a rank without requests of its own, waits for ever.
  /// Programs of ten lines hang in one of three runs. Ranks answer whenever they call MPI. So if there are several
  /// hosts:
  ///  - If a rank sends to a rank of another host, that rank also sends to it. Only collective operations with messages
  ///    in both directions between two ranks are used.
  ///  - After the last barrier no rank calls MPI for a while. The last rank learns in this time that the barrier is
  ///    complete. When the ranks continue, each one sends its own requests before any has answered.
  [[nodiscard]] std::chrono::milliseconds rest(os::Clock::duration last_barrier) const noexcept override;

 private:
  [[nodiscard]] std::unique_ptr<ArrivedMessage> probe(int from, int tag);

  MPI_Comm comm_;
  const MpiThreads threads_;
  std::atomic<std::thread::id> thread_;
};

}  // namespace muster::mpi
