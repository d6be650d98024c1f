// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/calls.hpp"

#include <fmt/core.h>

#include <array>
#include <atomic>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "muster/error.hpp"

namespace muster::mpi {
namespace {

std::atomic<bool> rests{false};

/// Keeps what MPI may still touch, reachable until the process ends.
void keep_for_ever(std::shared_ptr<const void> memory) noexcept {
  if (!memory) return;
  static std::mutex mutex;
  using Kept = std::vector<std::shared_ptr<const void>>;
  alignas(Kept) static std::array<std::byte, sizeof(Kept)> place;
  static Kept& kept = *::new (place.data()) Kept;
  const std::lock_guard lock(mutex);
  try {
    kept.push_back(memory);
  } catch (const std::bad_alloc&) {
    // Then it leaks, which is as good: a pointer that is never destroyed.
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
  // MPICH's stack of calls is of use to its developers only: the last line says what it was.
  while (!words.empty() && words.back() == '\n') words.pop_back();
  if (const std::size_t line = words.find_last_of('\n'); line != std::string::npos) words.erase(0, line + 1);
  throw Error(ErrorKind::io, fmt::format("MPI: {}: {}", what, words));
}

bool must_rest() noexcept {
  return rests.load(std::memory_order_relaxed);
}

void throw_if_resting() {
  if (must_rest()) throw Error(ErrorKind::unsupported, resting_words);
}

bool is_running() noexcept {
  int flag = 0;
  if (must_rest() || MPI_Initialized(&flag) != MPI_SUCCESS || flag == 0) return false;
  return MPI_Finalized(&flag) == MPI_SUCCESS && flag == 0;
}

namespace {

/// The caller's communicator returns its errors while this lives: they must not end his process.
class ErrorsReturned {
 public:
  explicit ErrorsReturned(MPI_Comm comm) : comm_(comm) {
    check(MPI_Comm_get_errhandler(comm_, &before_), "asking for the error handler");
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "setting the error handler");
  }
  ~ErrorsReturned() {
    MPI_Comm_set_errhandler(comm_, before_);
    MPI_Errhandler_free(&before_);
  }
  ErrorsReturned(const ErrorsReturned&) = delete;
  ErrorsReturned& operator=(const ErrorsReturned&) = delete;

 private:
  MPI_Comm comm_;
  MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
};

}  // namespace

std::shared_ptr<Comm> Comm::duplicate(MPI_Comm comm, std::chrono::milliseconds timeout) {
  if (comm == MPI_COMM_NULL)
    throw Error(ErrorKind::argument,
                "mpi_group: MPI_COMM_NULL is no communicator: ranks that are not in it must not make the group");
  const ErrorsReturned quiet(comm);
  int is_inter = 0;
  check(MPI_Comm_test_inter(comm, &is_inter), "looking at the communicator");
  if (is_inter != 0)
    throw Error(ErrorKind::argument,
                "mpi_group: an inter-communicator has two groups of ranks: make one of them with MPI_Intercomm_merge");
  // MPI writes the result when it has finished, however late.
  const auto copy = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(comm, copy.get(), &request), "duplicating the communicator");
  Pending pending(request, copy);
  pending.wait(timeout, fmt::format("mpi_group: not all ranks of the communicator came within {:.1f} s: all of them "
                                    "have to make the group",
                                    std::chrono::duration<double>(timeout).count()));
  check(MPI_Comm_set_errhandler(*copy, MPI_ERRORS_RETURN), "setting the error handler");
  return std::make_shared<Comm>(*copy);
}

void Comm::free() noexcept {
  if (is_running() && comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
}

int Comm::rank() const {
  int rank = 0;
  check(MPI_Comm_rank(comm_, &rank), "asking for the rank");
  return rank;
}

int Comm::size() const {
  int size = 0;
  check(MPI_Comm_size(comm_, &size), "asking for the number of ranks");
  return size;
}

int Comm::most_tag() const {
  void* value = nullptr;
  int flag = 0;
  // An attribute of this one only, says the standard: duplicates need not have it.
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&value), &flag), "asking for the largest tag");
  constexpr int promised = 32767;
  return flag != 0 ? *static_cast<int*>(value) : promised;
}

Pending& Pending::operator=(Pending&& other) noexcept {
  if (this != &other) {
    abandon();
    request_ = std::exchange(other.request_, MPI_REQUEST_NULL);
    keeper_ = std::move(other.keeper_);
    borrows_ = other.borrows_;
  }
  return *this;
}

Pending::~Pending() {
  abandon();
}

bool Pending::is_over() noexcept {
  int flag = 0;
  if (!is_open()) return true;
  if (!is_running() || MPI_Test(&request_, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS || flag == 0) return false;
  return finish();
}

void Pending::abandon() noexcept {
  if (!is_open() || (borrows_ && is_over())) return;
  if (borrows_) rests.store(true, std::memory_order_relaxed);
  keep_for_ever(std::move(keeper_));
}

bool Pending::test() {
  if (!is_open()) return true;
  throw_if_resting();
  int flag = 0;
  check(MPI_Test(&request_, &flag, MPI_STATUS_IGNORE), "testing a message");
  if (flag == 0) return false;
  return finish();
}

void Pending::wait(std::chrono::milliseconds longest, const std::string& late) {
  const auto deadline = std::chrono::steady_clock::now() + longest;
  while (!test()) {
    if (std::chrono::steady_clock::now() > deadline) throw Error(ErrorKind::timeout, late);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void Pending::cancel() noexcept {
  if (!is_open() || !is_running()) return;
  if (MPI_Cancel(&request_) == MPI_SUCCESS && MPI_Wait(&request_, MPI_STATUS_IGNORE) == MPI_SUCCESS) finish();
}

Pending start_send(const Comm& comm, int to, int tag, std::span<const std::byte> bytes,
                   std::shared_ptr<const void> keeper, Finished finished) {
  throw_if_resting();
  MPI_Request request = MPI_REQUEST_NULL;
  const auto send = finished == Finished::taken ? MPI_Issend : MPI_Isend;
  check(send(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, to, tag, comm.get(), &request), "sending");
  const bool borrows = !keeper && !bytes.empty();
  return {request, std::move(keeper), borrows};
}

Pending start_receive(const Comm& comm, int from, int tag, std::span<std::byte> bytes,
                      std::shared_ptr<const void> keeper) {
  throw_if_resting();
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Irecv(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, from, tag, comm.get(), &request),
        "receiving");
  const bool borrows = !keeper && !bytes.empty();
  return {request, std::move(keeper), borrows};
}

Pending send_copy(const Comm& comm, int to, int tag, std::span<const std::byte> bytes, Finished finished) {
  const auto copy = std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end());
  return start_send(comm, to, tag, *copy, copy, finished);
}

Found::~Found() {
  if (message_ == MPI_MESSAGE_NULL || !is_running()) return;
  // What is longer than its receive is cut off.
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Imrecv(nullptr, 0, MPI_BYTE, &message_, &request) == MPI_SUCCESS) MPI_Request_free(&request);
}

bool Found::look(const Comm& comm, int from, int tag) {
  if (message_ != MPI_MESSAGE_NULL) return true;
  throw_if_resting();
  int flag = 0;
  check(MPI_Improbe(from, tag, comm.get(), &flag, &message_, &status_), "looking for a message");
  return flag != 0;
}

std::size_t Found::bytes() const {
  int length = 0;
  check(MPI_Get_count(&status_, MPI_BYTE, &length), "asking for a message's length");
  return static_cast<std::size_t>(length);
}

Pending Found::receive(std::span<std::byte> place, std::shared_ptr<const void> keeper) {
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Imrecv(place.data(), static_cast<int>(place.size()), MPI_BYTE, &message_, &request), "receiving a message");
  return {request, std::move(keeper)};
}

}  // namespace muster::mpi
