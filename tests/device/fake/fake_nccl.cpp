// SPDX-License-Identifier: Apache-2.0
// An NCCL for tests, over the fake CUDA driver: none of what passes with it has been seen to work between devices. Rank
// 0 of a communicator listens at a socket that the identity names (a file: network namespaces do not part it); every
// other rank connects to it, and only pairs with rank 0 can talk. As with NCCL, calls return at once, the state has to
// be asked for, a batch takes its place in the stream, sends and receives of a pair match in their order, and two ranks
// on one device are refused.
//
// What is asked for comes into the stream some time after the group's end: who puts something there before the state is
// success has put it before. A group that stays open swallows all that follows.
//
// FAKE_NCCL_SILENT=1: this rank never comes. FAKE_NCCL_FAIL=FUNCTION: it fails. FAKE_NCCL_STUCK=1: what comes into a
// stream never ends, and the state says that a network has failed.

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "src/device/nccl.hpp"
#include "tests/device/fake/fake_cuda.hpp"

using muster::cuda::NcclConfig;
using muster::cuda::NcclId;
using muster::cuda::NcclStatus;

namespace {

constexpr auto system_error = static_cast<NcclStatus>(2);
constexpr auto invalid_argument = static_cast<NcclStatus>(4);
constexpr auto invalid_usage = static_cast<NcclStatus>(5);
constexpr auto remote_error = static_cast<NcclStatus>(6);

struct Hello {
  std::int32_t rank;
  unsigned char uuid[16];
};

std::atomic<std::uint64_t> inits{0};

sockaddr_un address_of(const NcclId& id, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, id.bytes, ::strnlen(id.bytes, 60));
  length = sizeof address;
  return address;
}

struct Operation {
  bool is_send;
  std::byte* data;
  std::size_t bytes;
  int peer;
};

}  // namespace

struct ncclComm {
  int size = 0;
  int rank = 0;
  NcclId id{};
  unsigned char uuid[16] = {};
  int listener = -1;
  std::vector<int> sockets;  // by rank
  int met = 0;
  bool is_refused = false;
  int looks = 0;  // until what is asked for comes into the stream
  std::vector<std::pair<void*, std::function<bool()>>> coming;
  std::shared_ptr<std::atomic<int>> failure = std::make_shared<std::atomic<int>>(0);

  ~ncclComm() {
    stop_listening();
    for (const int socket : sockets)
      if (socket >= 0) ::close(socket);
  }

  bool is_met = false;

  void come() {
    for (auto& [stream, one] : coming) fake_cuda_enqueue(stream, &one);
    coming.clear();
  }

  void stop_listening() {
    if (listener < 0) return;
    ::close(listener);
    listener = -1;
    ::unlink(id.bytes);
  }

  bool listen() {
    socklen_t length = 0;
    const sockaddr_un address = address_of(id, length);
    listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    return ::bind(listener, reinterpret_cast<const sockaddr*>(&address), length) == 0 && ::listen(listener, 64) == 0;
  }

  /// One try; true when all have met.
  bool meet() {
    if (rank != 0) {
      if (met == 1) return true;
      socklen_t length = 0;
      const sockaddr_un address = address_of(id, length);
      const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
        ::close(socket);
        return false;
      }
      Hello hello{rank, {}};
      std::memcpy(hello.uuid, uuid, sizeof uuid);
      if (::write(socket, &hello, sizeof hello) != static_cast<ssize_t>(sizeof hello)) is_refused = true;
      ::fcntl(socket, F_SETFL, O_NONBLOCK);
      sockets[0] = socket;
      met = 1;
      return true;
    }
    while (met < size - 1) {
      const int socket = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (socket < 0) return false;
      Hello hello{};
      if (::recv(socket, &hello, sizeof hello, MSG_WAITALL) != static_cast<ssize_t>(sizeof hello) || hello.rank <= 0 ||
          hello.rank >= size || std::memcmp(hello.uuid, uuid, sizeof uuid) == 0) {
        is_refused = true;
        ::close(socket);
        return true;
      }
      ::fcntl(socket, F_SETFL, O_NONBLOCK);
      sockets[static_cast<std::size_t>(hello.rank)] = socket;
      ++met;
    }
    stop_listening();
    return true;
  }
};

namespace {

thread_local std::vector<std::pair<ncclComm*, std::pair<void*, Operation>>> batch;
thread_local int depth = 0;
thread_local NcclStatus batch_failure = NcclStatus::success;

bool fails(const char* function) {
  const char* failing = std::getenv("FAKE_NCCL_FAIL");
  return failing != nullptr && std::strcmp(failing, function) == 0;
}

/// As in NCCL, the first error of a batch is also that of its end.
NcclStatus in_batch_failed(NcclStatus status) {
  if (batch_failure == NcclStatus::success) batch_failure = status;
  return status;
}

/// One step of one operation; true when it is done.
bool step(int socket, Operation& operation, std::atomic<int>& failure) {
  while (operation.bytes != 0) {
    const ssize_t count = operation.is_send ? ::send(socket, operation.data, operation.bytes, MSG_NOSIGNAL)
                                            : ::recv(socket, operation.data, operation.bytes, 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (count <= 0) {
      // A kernel that waits for a rank that is gone never ends.
      failure = static_cast<int>(remote_error);
      return false;
    }
    operation.data += count;
    operation.bytes -= static_cast<std::size_t>(count);
  }
  return true;
}

NcclStatus put(ncclComm* communicator, bool is_send, const void* data, std::size_t bytes, int peer, void* stream) {
  if (depth == 0) return invalid_usage;
  if (fails(is_send ? "ncclSend" : "ncclRecv")) return in_batch_failed(system_error);
  // NCCL refuses a communicator that is still busy with what came before.
  if (!communicator->is_met || !communicator->coming.empty()) return in_batch_failed(invalid_argument);
  const Operation operation{is_send, static_cast<std::byte*>(fake_cuda_memory(data)), bytes, peer};
  if (operation.data == nullptr) return in_batch_failed(invalid_argument);
  batch.push_back({communicator, {stream, operation}});
  return NcclStatus::success;
}

}  // namespace

extern "C" {

std::uint64_t fake_nccl_inits() {
  return inits;
}

int fake_nccl_depth() {
  return depth;
}

NcclStatus ncclGetVersion(int* version) {
  *version = 21803;
  return NcclStatus::success;
}

const char* ncclGetErrorString(NcclStatus) {
  return "said by the fake NCCL";
}

NcclStatus ncclGetUniqueId(NcclId* id) {
  if (fails("ncclGetUniqueId")) return system_error;
  static std::atomic<int> number{0};
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->bytes, sizeof id->bytes, "/tmp/fake-nccl-%d-%d", static_cast<int>(::getpid()), ++number);
  return NcclStatus::success;
}

NcclStatus ncclCommInitRankConfig(ncclComm** made, int size, NcclId id, int rank, NcclConfig* config) {
  ++inits;
  if (config == nullptr || config->blocking != 0 || config->magic != 0xcafebeef || config->size < 24)
    return invalid_argument;
  if (fails("ncclCommInitRankConfig")) return system_error;
  auto communicator = std::make_unique<ncclComm>();
  communicator->size = size;
  communicator->rank = rank;
  communicator->id = id;
  communicator->sockets.assign(static_cast<std::size_t>(size), -1);
  if (fake_cuda_current_uuid(communicator->uuid) != 0) return invalid_usage;
  if (rank == 0 && !communicator->listen()) return system_error;
  *made = communicator.release();
  return NcclStatus::in_progress;
}

NcclStatus ncclCommAbort(ncclComm* communicator) {
  // What is in a stream still names the sockets: they are shut, and stay.
  for (int& socket : communicator->sockets) {
    if (socket >= 0) ::shutdown(socket, SHUT_RDWR);
    socket = -1;
  }
  delete communicator;
  return NcclStatus::success;
}

NcclStatus ncclCommGetAsyncError(ncclComm* communicator, NcclStatus* status) {
  fake_cuda_tick();
  if (std::getenv("FAKE_NCCL_SILENT") != nullptr) {
    *status = NcclStatus::in_progress;
    return NcclStatus::success;
  }
  *status = communicator->meet() ? NcclStatus::success : NcclStatus::in_progress;
  if (communicator->is_refused) *status = invalid_usage;
  if (*status == NcclStatus::success) communicator->is_met = true;
  if (!communicator->coming.empty()) {
    *status = NcclStatus::in_progress;
    if (++communicator->looks >= 3) communicator->come();
  }
  if (*communicator->failure != 0) *status = static_cast<NcclStatus>(communicator->failure->load());
  return NcclStatus::success;
}

NcclStatus ncclGroupStart() {
  if (depth++ == 0) batch_failure = NcclStatus::success;
  return NcclStatus::success;
}

NcclStatus ncclSend(const void* data, std::size_t bytes, int, int peer, ncclComm* communicator, void* stream) {
  return put(communicator, true, data, bytes, peer, stream);
}

NcclStatus ncclRecv(void* data, std::size_t bytes, int, int peer, ncclComm* communicator, void* stream) {
  return put(communicator, false, data, bytes, peer, stream);
}

NcclStatus ncclGroupEnd() {
  if (depth == 0) return invalid_usage;
  if (--depth != 0) return NcclStatus::success;
  if (batch_failure != NcclStatus::success) {
    batch.clear();
    return batch_failure;
  }
  if (fails("ncclGroupEnd")) {
    batch.clear();
    return system_error;
  }
  for (auto& [communicator, item] : batch) {
    auto& [stream, operation] = item;
    const int socket = communicator->sockets[static_cast<std::size_t>(operation.peer)];
    if (socket < 0) return invalid_usage;
    communicator->looks = 0;
    communicator->coming.emplace_back(
        stream, [socket, operation = operation, failure = communicator->failure, turns = 0]() mutable {
          if (std::getenv("FAKE_NCCL_STUCK") != nullptr) {
            if (++turns > 30) *failure = static_cast<int>(remote_error);
            return false;
          }
          return step(socket, operation, *failure);
        });
  }
  batch.clear();
  return NcclStatus::in_progress;
}

}  // extern "C"
