// SPDX-License-Identifier: Apache-2.0
#include "src/device/nccl.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "muster/error.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/device/driver.hpp"
#include "src/os/clock.hpp"
#include "src/sync/failing.hpp"

namespace muster::cuda {
namespace {

const NcclFunctions& nccl() {
  std::string reason;
  const NcclFunctions* found = find_nccl(&reason);
  if (found == nullptr) throw Error(ErrorKind::unsupported, reason);
  return *found;
}

void check(NcclStatus status, const char* attempted) {
  if (status == NcclStatus::success || status == NcclStatus::in_progress) return;
  const char* words = nccl().error_string(status);
  throw Error(ErrorKind::io, fmt::format("NCCL: {}: {} (NCCL_DEBUG=WARN says more)", attempted,
                                         words == nullptr ? "unknown error" : words));
}

}  // namespace

const NcclFunctions* find_nccl(std::string* reason) noexcept {
  static ForkMutex mutex;
  static NcclFunctions functions;
  static bool is_loaded = false;
  try {
    const std::lock_guard lock(mutex);
    if (is_loaded) return &functions;
    const Missing missing = find_functions("libnccl.so.2", functions);
    is_loaded = missing.library.empty() && missing.function.empty();
    if (is_loaded) return &functions;
    if (reason != nullptr)
      *reason = missing.function.empty()
                    ? fmt::format("NCCL is not here ({})", missing.library)
                    : fmt::format("NCCL has no function {}: it is older than 2.14", missing.function);
    return nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

std::string nccl_version() {
  int version = 0;
  check(nccl().version(&version), "asking for its version");
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

NcclId make_nccl_id() {
  NcclId id{};
  check(nccl().unique_id(&id), "making an identity for a communicator");
  return id;
}

Communicator::Communicator(int size, int rank, const NcclId& id) {
  NcclConfig config;
  const NcclStatus status = nccl().init(&handle_, size, id, rank, &config);
  if (status == NcclStatus::success || status == NcclStatus::in_progress) return;
  if (handle_ != nullptr) nccl().abort(std::exchange(handle_, nullptr));
  check(status, "meeting the other ranks' devices");
}

Communicator::~Communicator() {
  // Without the driver there is nothing to abort. A forked child owns no communicator.
  if (handle_ == nullptr || find_driver() == nullptr) return;
  if (const NcclFunctions* functions = find_nccl()) (is_closed_ ? functions->destroy : functions->abort)(handle_);
}

bool Communicator::is_ready() const {
  NcclStatus status = NcclStatus::success;
  check(nccl().async_error(handle_, &status), "asking for its state");
  if (status == NcclStatus::in_progress) return false;
  check(status, "moving tensors between devices");
  return true;
}

void Communicator::leave_batch() noexcept {
  // The batch fails together with its communicator, which is aborted.
  if (const NcclFunctions* functions = find_nccl()) functions->group_end();
}

void Communicator::begin_batch() {
  check(nccl().group_start(), "beginning a batch");
}

void Communicator::send(DevicePointer data, std::uint64_t bytes, int to, StreamHandle stream) {
  check(nccl().send(address_of(data), bytes, NcclType::u8, to, handle_, stream), "sending a tensor");
}

void Communicator::receive(DevicePointer data, std::uint64_t bytes, int from, StreamHandle stream) {
  check(nccl().receive(address_of(data), bytes, NcclType::u8, from, handle_, stream), "receiving a tensor");
}

void Communicator::all_reduce(DevicePointer in, DevicePointer out, std::uint64_t bytes, const NcclReduction& what,
                              StreamHandle stream) {
  check(nccl().all_reduce(address_of(in), address_of(out), bytes / what.element_bytes, what.type, what.op, handle_,
                          stream),
        "reducing a tensor of all ranks");
}

void Communicator::reduce_scatter(DevicePointer in, DevicePointer out, std::uint64_t bytes, const NcclReduction& what,
                                  StreamHandle stream) {
  check(nccl().reduce_scatter(address_of(in), address_of(out), bytes / what.element_bytes, what.type, what.op, handle_,
                              stream),
        "reducing the ranks' slices of a tensor");
}

void Communicator::reduce(DevicePointer in, DevicePointer out, std::uint64_t bytes, const NcclReduction& what, int root,
                          StreamHandle stream) {
  check(nccl().reduce(address_of(in), address_of(out), bytes / what.element_bytes, what.type, what.op, root, handle_,
                      stream),
        "reducing a tensor to one rank");
}

void Communicator::broadcast(DevicePointer in, DevicePointer out, std::uint64_t bytes, int root, StreamHandle stream) {
  check(nccl().broadcast(address_of(in), address_of(out), bytes, NcclType::u8, root, handle_, stream),
        "broadcasting a tensor");
}

void Communicator::all_gather(DevicePointer in, DevicePointer out, std::uint64_t bytes, StreamHandle stream) {
  check(nccl().all_gather(address_of(in), address_of(out), bytes, NcclType::u8, handle_, stream),
        "gathering a tensor of each rank");
}

void Communicator::begin_close() {
  check(nccl().finalize(handle_), "ending a communicator");
}

void Communicator::end_batch() {
  check(nccl().group_end(), "ending a batch");
}

void by_nccl_or_fail(SyncGroup& group, std::span<const int> others, const WaitOptions& options,
                     const std::function<void()>& work, const std::function<void()>& drop) {
  try {
    // If the group has failed, its error is thrown, even if NCCL has reported that failure as an error of its own.
    const std::optional<Error> error = sync::attempt(group, work);
    if (!error) return;
    // NCCL often notices a death before the group does, but the error of the group is more precise.
    const auto until = os::Clock::now() + std::chrono::seconds(1);
    group.wait_until(
        [&] { return os::Clock::now() >= until; },
        [](std::chrono::nanoseconds longest) {
          std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(longest, std::chrono::milliseconds(10)));
        },
        others, options);
    sync::fail(group, sync::error_of(group.info(group.rank()), error->kind(), error->what()));
  } catch (const Error&) {
    // A stream that waits for a dead rank would never become idle, so its communicator is aborted first.
    drop();
    throw;
  }
}

}  // namespace muster::cuda
