// SPDX-License-Identifier: Apache-2.0
#pragma once
// MPI's calls: each checked once, requests and communicators with one owner, and nothing that MPI may still write to is
// ever freed.

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace muster::mpi {

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

/// Throws Error(unsupported) where must_rest(): also what another thread waits for ends then.
void throw_if_resting();

/// A duplicate of a communicator that returns its errors. Not freed by its destructor: as long as requests may be open
/// nobody may, and whether there are any only its context knows (context.hpp).
class Comm {
 public:
  /// Collective. Throws Error(argument) where it is no communicator of a group of ranks, Error(timeout) where not all
  /// ranks come: MPI does not say which.
  static std::shared_ptr<Comm> duplicate(MPI_Comm comm, std::chrono::milliseconds timeout);
  explicit Comm(MPI_Comm comm) noexcept : comm_(comm) {}
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  [[nodiscard]] MPI_Comm get() const noexcept { return comm_; }
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  /// The largest tag, which is MPI's, the same for all communicators.
  [[nodiscard]] int most_tag() const;
  /// Gives it back to MPI; all its requests have ended.
  void free() noexcept;

 private:
  MPI_Comm comm_;
};

/// A send or receive that MPI has not finished. Its memory is kept by `keeper` until it is; where it never is, for
/// ever.
class Pending {
 public:
  Pending() noexcept = default;
  Pending(MPI_Request request, std::shared_ptr<const void> keeper, bool borrows = false) noexcept
      : request_(request), keeper_(std::move(keeper)), borrows_(borrows) {}
  Pending(Pending&& other) noexcept
      : request_(std::exchange(other.request_, MPI_REQUEST_NULL)),
        keeper_(std::move(other.keeper_)),
        borrows_(other.borrows_) {}
  Pending& operator=(Pending&& other) noexcept;
  /// An unfinished one is abandoned: what it works on stays until the process ends. Where that is the caller's, MPI has
  /// to rest from then on.
  ~Pending();
  /// Whether it has finished. A last look after a failure: between ranks that live MPI has gone on meanwhile.
  bool is_over() noexcept;

  [[nodiscard]] bool is_open() const noexcept { return request_ != MPI_REQUEST_NULL; }
  /// What it works on is the caller's.
  [[nodiscard]] bool borrows() const noexcept { return borrows_; }
  /// Whether it has finished; makes MPI go on. Throws Error(io), Error(unsupported) where MPI has to rest.
  bool test();
  /// Until it has finished. Throws Error(timeout) with `late`.
  void wait(std::chrono::milliseconds longest, const std::string& late);
  /// Takes back a receive that nobody has answered yet. Waits for MPI to say so, which is a local matter.
  void cancel() noexcept;

 private:
  void abandon() noexcept;
  /// True.
  bool finish() noexcept {
    request_ = MPI_REQUEST_NULL;
    keeper_.reset();
    return true;
  }

  MPI_Request request_ = MPI_REQUEST_NULL;
  std::shared_ptr<const void> keeper_;
  bool borrows_ = false;  // memory that nobody here keeps
};

/// One call moves at most so much: MPI's counts are ints.
inline constexpr std::size_t largest_piece = std::size_t{1} << 30;

/// When a send has finished: its bytes can be used again, or its receiver has begun to take them in, too.
enum class Finished : std::uint8_t { sent, taken };

/// `bytes` (at most largest_piece) must stay until it has finished: `keeper` keeps them; where it is null the caller
/// does.
Pending start_send(const Comm& comm, int to, int tag, std::span<const std::byte> bytes,
                   std::shared_ptr<const void> keeper, Finished finished = Finished::sent);
Pending start_receive(const Comm& comm, int from, int tag, std::span<std::byte> bytes,
                      std::shared_ptr<const void> keeper);
/// Of bytes that are copied for it.
Pending send_copy(const Comm& comm, int to, int tag, std::span<const std::byte> bytes,
                  Finished finished = Finished::sent);

/// A message that has come, and that no other receive finds any more. Without a receive its bytes are dropped: its
/// sender does not wait for them.
class Found {
 public:
  Found() noexcept = default;
  ~Found();
  Found(const Found&) = delete;
  Found& operator=(const Found&) = delete;

  /// Whether there is one, by now or already; makes MPI go on. Throws Error(io), Error(unsupported) where MPI has to
  /// rest.
  bool look(const Comm& comm, int from, int tag);
  [[nodiscard]] int tag() const noexcept { return status_.MPI_TAG; }
  [[nodiscard]] std::size_t bytes() const;
  /// `place` has room for all of it.
  Pending receive(std::span<std::byte> place, std::shared_ptr<const void> keeper);

 private:
  MPI_Message message_ = MPI_MESSAGE_NULL;
  MPI_Status status_{};
};

}  // namespace muster::mpi
