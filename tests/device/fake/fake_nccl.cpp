// SPDX-License-Identifier: Apache-2.0
// An NCCL for tests, over the fake CUDA driver. A test that passes with it proves nothing about real devices.
//
// Each rank of a communicator listens on a socket whose name comes from the ID (a file, which network namespaces do not
// separate), and connects to the lower ranks. As with NCCL, calls return at once and the state must be polled. A batch
// takes its place in the stream. Sends and receives of a pair match in order, and two ranks on one device are refused.
// A reduction uses the order of the ranks.
//
// A batch enters the stream some time after the end of its group call. Work that is queued before the state is success
// is therefore queued before the batch. An open group call collects all following calls. An orderly end of a
// communicator waits for the other ranks. Work of an aborted communicator in a stream ends at once.
//
// FAKE_NCCL_SILENT=1: this rank never joins. FAKE_NCCL_FAIL=FUNCTION: this function fails. FAKE_NCCL_STUCK=1: work in a
// stream never ends, and the state reports a network failure.

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/device/fake/fake_cuda.hpp"
#include "tests/device/fake/fake_mesh.hpp"

using namespace fake;
using muster::cuda::NcclConfig;
using muster::cuda::NcclId;

namespace {

struct Hello {
  std::int32_t rank;
  unsigned char uuid[16];
};

std::atomic<std::uint64_t> inits{0};
std::atomic<std::uint64_t> ended{0};

sockaddr_un address_of(const NcclId& id, int rank) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof address.sun_path, "%.60s-%d", id.bytes, rank);
  return address;
}

}  // namespace

struct ncclComm {
  int size = 0;
  int rank = 0;
  NcclId id{};
  unsigned char uuid[16] = {};
  int listener = -1;
  std::vector<int> sockets;  // by rank
  bool is_refused = false;
  bool is_met = false;
  int looks = 0;  // polls until the batch enters the stream
  std::vector<std::pair<void*, std::function<bool()>>> coming;
  std::shared_ptr<State> state = std::make_shared<State>();
  bool is_ending = false;
  std::vector<bool> have_ended;  // by rank

  ~ncclComm() {
    stop_listening();
    for (const int socket : sockets)
      if (socket >= 0) ::close(socket);
  }

  void come() {
    for (auto& [stream, one] : coming) fake_cuda_enqueue(stream, &one);
    coming.clear();
  }

  void stop_listening() {
    if (listener < 0) return;
    ::close(listener);
    listener = -1;
    ::unlink(address_of(id, rank).sun_path);
  }

  bool listen() {
    const sockaddr_un address = address_of(id, rank);
    listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    return ::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
           ::listen(listener, 64) == 0;
  }

  void connect(int to) {
    const sockaddr_un address = address_of(id, to);
    const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      ::close(socket);
      return;
    }
    Hello hello{rank, {}};
    std::memcpy(hello.uuid, uuid, sizeof uuid);
    if (::write(socket, &hello, sizeof hello) != static_cast<ssize_t>(sizeof hello)) is_refused = true;
    ::fcntl(socket, F_SETFL, O_NONBLOCK);
    sockets[static_cast<std::size_t>(to)] = socket;
  }

  bool accept() {
    const int socket = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) return false;
    Hello hello{};
    if (::recv(socket, &hello, sizeof hello, MSG_WAITALL) != static_cast<ssize_t>(sizeof hello) || hello.rank <= rank ||
        hello.rank >= size || std::memcmp(hello.uuid, uuid, sizeof uuid) == 0) {
      is_refused = true;
      ::close(socket);
      return false;
    }
    ::fcntl(socket, F_SETFL, O_NONBLOCK);
    sockets[static_cast<std::size_t>(hello.rank)] = socket;
    return true;
  }

  /// Makes one attempt. Returns true when all ranks are connected.
  bool meet() {
    if (is_met || is_refused) return true;
    for (int other = 0; other < rank; ++other)
      if (sockets[static_cast<std::size_t>(other)] < 0) connect(other);
    while (accept()) continue;
    for (int other = 0; other < size; ++other)
      if (other != rank && sockets[static_cast<std::size_t>(other)] < 0) return is_refused;
    stop_listening();
    is_met = true;
    return true;
  }

  /// Makes one attempt. Returns true when all other ranks have ended or are gone.
  bool end() {
    for (std::size_t other = 0; other < sockets.size(); ++other) {
      std::byte word{};
      if (have_ended[other] || sockets[other] < 0) continue;
      const ssize_t count = ::recv(sockets[other], &word, 1, 0);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
      have_ended[other] = true;
    }
    return true;
  }
};

namespace {

/// One call on a communicator in a batch.
struct Asked {
  ncclComm* communicator;
  void* stream;
  std::function<void(Exchange&)> add;
};

thread_local std::vector<Asked> batch;
thread_local int depth = 0;
thread_local NcclStatus batch_failure = NcclStatus::success;

bool fails(const char* function) {
  const char* failing = std::getenv("FAKE_NCCL_FAIL");
  return failing != nullptr && std::strcmp(failing, function) == 0;
}

/// As in NCCL, the end of a batch returns the batch's first error.
NcclStatus in_batch_failed(NcclStatus status) {
  if (batch_failure == NcclStatus::success) batch_failure = status;
  return status;
}

/// Elements on a device; a null address has none.
Span elements(const void* data, std::size_t count, NcclType type) {
  return {static_cast<std::byte*>(fake_cuda_memory(data)), count * bytes_of(type)};
}

NcclStatus put(const char* function, ncclComm* communicator, void* stream, std::initializer_list<Span> used,
               std::function<void(Exchange&)> add) {
  if (depth == 0) return invalid_usage;
  if (fails(function)) return in_batch_failed(system_error);
  // NCCL refuses a communicator that is still busy with an earlier call.
  if (!communicator->is_met || communicator->is_ending || !communicator->coming.empty())
    return in_batch_failed(invalid_argument);
  for (const Span each : used)
    if (each.data() == nullptr) return in_batch_failed(invalid_argument);
  void* const real = fake_cuda_stream(stream);
  if (real == nullptr) return in_batch_failed(invalid_argument);
  batch.push_back({communicator, real, std::move(add)});
  return NcclStatus::success;
}

/// Returns the data of each rank, in order: this rank's data in place, and the others' in temporary memory.
std::vector<Span> all_of(Exchange& exchange, Span mine) {
  std::vector<Span> all;
  for (int rank = 0; rank < exchange.size(); ++rank) {
    all.push_back(rank == exchange.rank() ? mine : exchange.room(mine.size()));
    if (rank != exchange.rank()) exchange.receive(rank, all.back());
  }
  return all;
}

void send_to_others(Exchange& exchange, Span data) {
  for (int rank = 0; rank < exchange.size(); ++rank)
    if (rank != exchange.rank()) exchange.send(rank, data);
}

void copy(Span from, Span to) {
  if (from.data() != to.data()) std::memmove(to.data(), from.data(), from.size());
}

}  // namespace

extern "C" {

std::uint64_t fake_nccl_inits() {
  return inits;
}

/// Returns the number of communicators that have ended in order.
std::uint64_t fake_nccl_ended() {
  return ended;
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
  communicator->have_ended.assign(static_cast<std::size_t>(size), false);
  if (fake_cuda_current_uuid(communicator->uuid) != 0) return invalid_usage;
  if (!communicator->listen()) return system_error;
  *made = communicator.release();
  return NcclStatus::in_progress;
}

NcclStatus ncclCommAbort(ncclComm* communicator) {
  communicator->state->is_aborted = true;
  // Work in a stream still refers to the sockets, so they are shut down, but not closed.
  for (int& socket : communicator->sockets) {
    if (socket >= 0) ::shutdown(socket, SHUT_RDWR);
    socket = -1;
  }
  delete communicator;
  return NcclStatus::success;
}

NcclStatus ncclCommFinalize(ncclComm* communicator) {
  if (communicator->is_ending || !communicator->is_met) return invalid_argument;
  communicator->is_ending = true;
  const std::byte word{};
  for (const int socket : communicator->sockets)
    if (socket >= 0) (void)::send(socket, &word, 1, MSG_NOSIGNAL);
  return NcclStatus::in_progress;
}

NcclStatus ncclCommDestroy(ncclComm* communicator) {
  if (!communicator->is_ending) return invalid_usage;
  ++ended;
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
  if (communicator->is_ending && !communicator->end()) *status = NcclStatus::in_progress;
  if (!communicator->coming.empty()) {
    *status = NcclStatus::in_progress;
    if (++communicator->looks >= 3) communicator->come();
  }
  if (const int failure = communicator->state->failure) *status = static_cast<NcclStatus>(failure);
  return NcclStatus::success;
}

NcclStatus ncclGroupStart() {
  if (depth++ == 0) batch_failure = NcclStatus::success;
  return NcclStatus::success;
}

NcclStatus ncclSend(const void* data, std::size_t count, NcclType type, int peer, ncclComm* communicator,
                    void* stream) {
  const Span sent = elements(data, count, type);
  return put("ncclSend", communicator, stream, {sent}, [=](Exchange& exchange) { exchange.send(peer, sent); });
}

NcclStatus ncclRecv(void* data, std::size_t count, NcclType type, int peer, ncclComm* communicator, void* stream) {
  const Span room = elements(data, count, type);
  return put("ncclRecv", communicator, stream, {room}, [=](Exchange& exchange) { exchange.receive(peer, room); });
}

NcclStatus ncclAllReduce(const void* in, void* out, std::size_t count, NcclType type, NcclOp op, ncclComm* communicator,
                         void* stream) {
  const Span mine = elements(in, count, type);
  const Span result = elements(out, count, type);
  return put("ncclAllReduce", communicator, stream, {mine, result}, [=](Exchange& exchange) {
    send_to_others(exchange, mine);
    exchange.at_end([=, all = all_of(exchange, mine)] { reduce(result, all, type, op); });
  });
}

NcclStatus ncclReduce(const void* in, void* out, std::size_t count, NcclType type, NcclOp op, int root,
                      ncclComm* communicator, void* stream) {
  const Span mine = elements(in, count, type);
  const Span result = communicator->rank == root ? elements(out, count, type) : mine;
  return put("ncclReduce", communicator, stream, {mine, result}, [=](Exchange& exchange) {
    if (exchange.rank() != root) return exchange.send(root, mine);
    exchange.at_end([=, all = all_of(exchange, mine)] { reduce(result, all, type, op); });
  });
}

NcclStatus ncclBroadcast(const void* in, void* out, std::size_t count, NcclType type, int root, ncclComm* communicator,
                         void* stream) {
  const Span room = elements(out, count, type);
  const Span given = communicator->rank == root ? elements(in, count, type) : room;
  return put("ncclBroadcast", communicator, stream, {given, room}, [=](Exchange& exchange) {
    if (exchange.rank() != root) return exchange.receive(root, room);
    send_to_others(exchange, given);
    exchange.at_end([=] { copy(given, room); });
  });
}

NcclStatus ncclAllGather(const void* in, void* out, std::size_t count, NcclType type, ncclComm* communicator,
                         void* stream) {
  const Span mine = elements(in, count, type);
  const Span all = elements(out, count * static_cast<std::size_t>(communicator->size), type);
  return put("ncclAllGather", communicator, stream, {mine, all}, [=](Exchange& exchange) {
    send_to_others(exchange, mine);
    for (int rank = 0; rank < exchange.size(); ++rank) {
      const Span place = all.subspan(static_cast<std::size_t>(rank) * mine.size(), mine.size());
      if (rank != exchange.rank())
        exchange.receive(rank, place);
      else
        exchange.at_end([=] { copy(mine, place); });
    }
  });
}

NcclStatus ncclReduceScatter(const void* in, void* out, std::size_t count, NcclType type, NcclOp op,
                             ncclComm* communicator, void* stream) {
  const Span mine = elements(in, count * static_cast<std::size_t>(communicator->size), type);
  const Span result = elements(out, count, type);
  return put("ncclReduceScatter", communicator, stream, {mine, result}, [=](Exchange& exchange) {
    const auto slice = [&](int rank) {
      return mine.subspan(static_cast<std::size_t>(rank) * result.size(), result.size());
    };
    for (int rank = 0; rank < exchange.size(); ++rank)
      if (rank != exchange.rank()) exchange.send(rank, slice(rank));
    exchange.at_end([=, all = all_of(exchange, slice(exchange.rank()))] { reduce(result, all, type, op); });
  });
}

NcclStatus ncclGroupEnd() {
  if (depth == 0) return invalid_usage;
  if (--depth != 0) return NcclStatus::success;
  const std::vector<Asked> asked = std::move(batch);
  batch.clear();
  if (batch_failure != NcclStatus::success) return batch_failure;
  if (fails("ncclGroupEnd")) return system_error;
  // Calls of one communicator on one stream run at the same time.
  std::vector<std::pair<Asked, Exchange>> exchanges;
  for (const Asked& each : asked) {
    auto found = exchanges.begin();
    while (found != exchanges.end() &&
           (found->first.communicator != each.communicator || found->first.stream != each.stream))
      ++found;
    if (found == exchanges.end())
      found = exchanges.insert(
          found, {each, Exchange(each.communicator->rank, each.communicator->sockets, each.communicator->state)});
    each.add(found->second);
  }
  for (auto& [each, exchange] : exchanges) {
    each.communicator->looks = 0;
    each.communicator->coming.emplace_back(
        each.stream, [exchange = exchange, state = each.communicator->state, turns = 0]() mutable {
          if (std::getenv("FAKE_NCCL_STUCK") != nullptr) {
            if (++turns > 30) state->failure = static_cast<int>(remote_error);
            return state->is_aborted.load();
          }
          return exchange.step();
        });
  }
  return NcclStatus::in_progress;
}

}  // extern "C"
