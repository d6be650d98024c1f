// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/transport.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "muster/error.hpp"

#include "src/base/fork_mutex.hpp"
#include "src/os/clock.hpp"

namespace muster::mpi {
namespace {

std::atomic<bool> rests{false};

/// Keeps memory that MPI may still access until the process ends.
void keep_for_ever(std::shared_ptr<const void> memory) noexcept {
  if (!memory) return;
  static ForkMutex mutex;
  using Kept = std::vector<std::shared_ptr<const void>>;
  alignas(Kept) static std::array<std::byte, sizeof(Kept)> place;
  static Kept& kept = *::new (place.data()) Kept;
  try {
    const std::lock_guard lock(mutex);
    kept.push_back(memory);
  } catch (const std::exception&) {
    // Out of memory, or in a forked child. The memory then leaks, which has the same effect: the pointer is never
    // destroyed.
    using Pointer = std::shared_ptr<const void>;
    alignas(Pointer) std::array<std::byte, sizeof(Pointer)> leaked;
    ::new (leaked.data()) Pointer(std::move(memory));
  }
}

}  // namespace

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  std::string words(text.data(), static_cast<std::size_t>(length));
  // The call stack of MPICH is useful only to its developers. The last line contains the cause.
  while (!words.empty() && words.back() == '\n') words.pop_back();
  if (const std::size_t line = words.find_last_of('\n'); line != std::string::npos) words.erase(0, line + 1);
  throw Error(ErrorKind::io, fmt::format("MPI: {}: {}", what, words));
}

bool must_rest() noexcept {
  return rests.load(std::memory_order_relaxed);
}

bool is_running() noexcept {
  int flag = 0;
  if (must_rest() || MPI_Initialized(&flag) != MPI_SUCCESS || flag == 0) return false;
  return MPI_Finalized(&flag) == MPI_SUCCESS && flag == 0;
}

namespace {

void throw_if_resting() {
  if (must_rest()) throw Error(ErrorKind::unsupported, resting_words);
}

/// While this object exists, the communicator of the caller returns its errors, because they must not terminate the
/// process.
class ErrorsReturned {
 public:
  explicit ErrorsReturned(MPI_Comm comm) : comm_(comm) {
    check(MPI_Comm_get_errhandler(comm_, &before_), "reading the error handler");
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "setting the error handler");
  }
  ~ErrorsReturned() {
    MPI_Comm_set_errhandler(comm_, before_);
    MPI_Errhandler_free(&before_);
  }
  ErrorsReturned& operator=(ErrorsReturned&&) = delete;

 private:
  MPI_Comm comm_;
  MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
};

/// A send, a receive or a collective operation of MPI. `keeper` keeps its memory until MPI has completed the operation,
/// or permanently if MPI never does.
class MpiRequest final : public multihost::TransferOperation {
 public:
  MpiRequest(MPI_Request request, std::shared_ptr<const void> keeper, bool borrows = false) noexcept
      : request_(request), keeper_(std::move(keeper)), borrows_(borrows) {}

  bool test() override {
    throw_if_resting();
    int flag = 0;
    check(MPI_Test(&request_, &flag, MPI_STATUS_IGNORE), "testing a message");
    return flag != 0;
  }
  /// Waits until MPI confirms it. This needs no other rank.
  bool cancel() noexcept override {
    return is_running() && MPI_Cancel(&request_) == MPI_SUCCESS &&
           MPI_Wait(&request_, MPI_STATUS_IGNORE) == MPI_SUCCESS;
  }
  /// The memory of the operation is kept until the process ends. If it belongs to the caller, MPI must not be called
  /// any more.
  void abandon() noexcept override {
    if (borrows_ && is_over()) return;
    if (borrows_) rests.store(true, std::memory_order_relaxed);
    keep_for_ever(std::move(keeper_));
  }
  [[nodiscard]] bool borrows() const noexcept override { return borrows_; }

 private:
  bool is_over() noexcept {
    int flag = 0;
    return is_running() && MPI_Test(&request_, &flag, MPI_STATUS_IGNORE) == MPI_SUCCESS && flag != 0;
  }

  MPI_Request request_;
  std::shared_ptr<const void> keeper_;
  bool borrows_;  // the memory belongs to the caller
};

PendingTransfer pending(MPI_Request request, std::shared_ptr<const void> keeper, bool borrows = false) {
  return PendingTransfer(std::make_shared<MpiRequest>(request, std::move(keeper), borrows));
}

class MpiFound final : public ArrivedMessage {
 public:
  MpiFound(MPI_Message message, MPI_Status status) noexcept : message_(message), status_(status) {}
  ~MpiFound() override {
    if (message_ == MPI_MESSAGE_NULL || !is_running()) return;
    // A message that is longer than its receive is truncated.
    MPI_Request request = MPI_REQUEST_NULL;
    if (MPI_Imrecv(nullptr, 0, MPI_BYTE, &message_, &request) == MPI_SUCCESS) MPI_Request_free(&request);
  }
  MpiFound& operator=(MpiFound&&) = delete;

  [[nodiscard]] int from() const noexcept override { return status_.MPI_SOURCE; }
  [[nodiscard]] int tag() const noexcept override { return status_.MPI_TAG; }
  [[nodiscard]] std::size_t bytes() const override {
    int length = 0;
    check(MPI_Get_count(&status_, MPI_BYTE, &length), "reading the length of a message");
    return static_cast<std::size_t>(length);
  }
  PendingTransfer receive(std::span<std::byte> place, std::shared_ptr<const void> keeper) override {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Imrecv(place.data(), static_cast<int>(place.size()), MPI_BYTE, &message_, &request),
          "receiving a message");
    return pending(request, std::move(keeper));
  }

 private:
  MPI_Message message_;
  MPI_Status status_;
};

}  // namespace

std::shared_ptr<MpiTransport> MpiTransport::over(MPI_Comm comm, MpiThreads threads, std::chrono::milliseconds timeout) {
  if (comm == MPI_COMM_NULL)
    throw Error(ErrorKind::invalid_argument,
                "mpi_group: the communicator must not be MPI_COMM_NULL. Call it only on ranks of the communicator");
  const ErrorsReturned quiet(comm);
  int is_inter = 0;
  check(MPI_Comm_test_inter(comm, &is_inter), "reading the kind of the communicator");
  if (is_inter != 0)
    throw Error(ErrorKind::invalid_argument,
                "mpi_group: an inter-communicator has two groups of ranks. Merge them with MPI_Intercomm_merge first");
  // MPI writes the result when it has completed the operation, however late that is.
  const auto copy = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(comm, copy.get(), &request), "duplicating the communicator");
  pending(request, copy)
      .wait(timeout, fmt::format("mpi_group: timed out after {:.1f} s: not all ranks of the communicator called it. "
                                 "Call it on all of them, or raise MUSTER_TIMEOUT (seconds)",
                                 std::chrono::duration<double>(timeout).count()));
  check(MPI_Comm_set_errhandler(*copy, MPI_ERRORS_RETURN), "setting the error handler");
  int rank = 0;
  int size = 0;
  check(MPI_Comm_rank(*copy, &rank), "reading the rank");
  check(MPI_Comm_size(*copy, &size), "reading the number of ranks");
  return std::make_shared<MpiTransport>(*copy, threads, rank, size);
}

MpiTransport::MpiTransport(MPI_Comm comm, MpiThreads threads, int rank, int size) noexcept
    : Transport(rank, size), comm_(comm), threads_(threads), thread_(std::this_thread::get_id()) {}

int MpiTransport::most_tag() const {
  void* value = nullptr;
  int flag = 0;
  // According to the standard only MPI_COMM_WORLD has this attribute. Duplicates need not have it.
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&value), &flag), "reading the largest tag");
  constexpr int promised = 32767;
  return flag != 0 ? *static_cast<int*>(value) : promised;
}

PendingTransfer MpiTransport::send(int to, int tag, std::span<const std::byte> bytes,
                                   std::shared_ptr<const void> keeper, SendEnd finished) {
  throw_if_resting();
  MPI_Request request = MPI_REQUEST_NULL;
  const auto start = finished == SendEnd::taken ? MPI_Issend : MPI_Isend;
  check(start(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, to, tag, comm_, &request), "sending");
  const bool borrows = !keeper && !bytes.empty();
  return pending(request, std::move(keeper), borrows);
}

PendingTransfer MpiTransport::receive(int from, int tag, std::span<std::byte> bytes,
                                      std::shared_ptr<const void> keeper) {
  throw_if_resting();
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Irecv(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE,
                  from == multihost::any_rank ? MPI_ANY_SOURCE : from, tag, comm_, &request),
        "receiving");
  const bool borrows = !keeper && !bytes.empty();
  return pending(request, std::move(keeper), borrows);
}

std::unique_ptr<ArrivedMessage> MpiTransport::find(int from, int tag) {
  return probe(from == multihost::any_rank ? MPI_ANY_SOURCE : from, tag);
}

std::unique_ptr<ArrivedMessage> MpiTransport::find_any() {
  return probe(MPI_ANY_SOURCE, MPI_ANY_TAG);
}

std::unique_ptr<ArrivedMessage> MpiTransport::probe(int from, int tag) {
  throw_if_resting();
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status{};
  int flag = 0;
  check(MPI_Improbe(from, tag, comm_, &flag, &message, &status), "probing for a message");
  return flag == 0 ? nullptr : std::make_unique<MpiFound>(message, status);
}

PendingTransfer MpiTransport::barrier() {
  // MPI_Ibarrier is not used: its messages have only one direction between two ranks, and those of MPI_Iallreduce have
  // both (rest()).
  const auto word = std::make_shared<std::array<int, 2>>();
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallreduce(word->data(), word->data() + 1, 1, MPI_INT, MPI_MAX, comm_, &request), "disconnecting");
  return pending(request, word);
}

std::vector<std::byte> MpiTransport::tell_all(std::span<const std::byte> mine, std::chrono::milliseconds timeout) {
  // The parts of other ranks are zeros here. The messages of this operation have both directions between two ranks;
  // those of an all-gather would not (rest()).
  struct Said {
    std::vector<std::byte> mine;
    std::vector<std::byte> all;
  };
  const auto said = std::make_shared<Said>();
  said->mine.resize(mine.size() * static_cast<std::size_t>(size()));
  said->all.resize(said->mine.size());
  std::ranges::copy(mine, said->mine.begin() + static_cast<std::ptrdiff_t>(mine.size()) * rank());
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallreduce(said->mine.data(), said->all.data(), static_cast<int>(said->all.size()), MPI_BYTE, MPI_BOR,
                       comm_, &request),
        "exchanging data of all ranks");
  pending(request, said)
      .wait(timeout, fmt::format("mpi_group: rank {} waited {:.1f} s for the other ranks of the communicator. Inspect "
                                 "these processes (muster status), or raise MUSTER_TIMEOUT (seconds)",
                                 rank(), std::chrono::duration<double>(timeout).count()));
  return said->all;
}

bool MpiTransport::may_call() const noexcept {
  return is_running() &&
         (threads_ == MpiThreads::all || std::this_thread::get_id() == thread_.load(std::memory_order_relaxed));
}

void MpiTransport::enter() {
  throw_if_resting();
  if (!is_running()) throw ended();
  take_over();
  if (!may_call())
    throw Error(ErrorKind::unsupported,
                "MPI: calling it from another thread: it was initialized for one thread only. Use the group in the "
                "thread that created it, or initialize MPI with MPI_THREAD_MULTIPLE",
                {.rank = rank()});
}

void MpiTransport::take_over() noexcept {
  if (threads_ == MpiThreads::each) thread_.store(std::this_thread::get_id());
}

void MpiTransport::throw_if_resting() const {
  if (mpi::must_rest()) throw Error(ErrorKind::unsupported, resting_words, {.rank = rank()});
}

Error MpiTransport::ended() const {
  return Error(ErrorKind::invalid_argument,
               "MPI: it has been finalized in this process (MPI_Finalize), so its groups cannot be used",
               {.rank = rank()});
}

bool MpiTransport::close() noexcept {
  if (is_running() && comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  return true;
}

std::chrono::milliseconds MpiTransport::rest(os::Clock::duration last_barrier) const noexcept {
  using std::chrono::milliseconds;
  // If ranks wait for CPU cores, they learn late that the last barrier is complete.
  return std::clamp(std::chrono::duration_cast<milliseconds>(10 * last_barrier), milliseconds(200), milliseconds(800));
}

}  // namespace muster::mpi
