// SPDX-License-Identifier: Apache-2.0

#include "src/cuda/nccl.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include "muster/error.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/cuda/driver.hpp"
#include "src/cuda/nccl_backend.hpp"
#include "src/group/error_propagation.hpp"
#include "src/os/clock.hpp"
#define XXH_INLINE_ALL
#include <xxhash.h>
#include <array>
#include <exception>
#include <string>
#include <utility>

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
  throw Error(ErrorKind::io, fmt::format("NCCL: {}: {}. Set NCCL_DEBUG=WARN for details", attempted,
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
                    ? fmt::format("NCCL is not installed ({})", missing.library)
                    : fmt::format("NCCL does not have the function {}: it is older than 2.14", missing.function);
    return nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

std::string nccl_version() {
  int version = 0;
  check(nccl().version(&version), "reading its version");
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

NcclId make_nccl_id() {
  NcclId id{};
  check(nccl().unique_id(&id), "creating an identity for a communicator");
  return id;
}

Communicator::Communicator(int size, int rank, const NcclId& id) {
  NcclConfig config;
  const NcclStatus status = nccl().init(&handle_, size, id, rank, &config);
  if (status == NcclStatus::success || status == NcclStatus::in_progress) return;
  if (handle_ != nullptr) nccl().abort(std::exchange(handle_, nullptr));
  check(status, "connecting to the devices of the other ranks");
}

Communicator::~Communicator() {
  // Without the driver there is nothing to abort. A forked child owns no communicator.
  if (handle_ == nullptr || find_driver() == nullptr) return;
  if (const NcclFunctions* functions = find_nccl()) (is_closed_ ? functions->destroy : functions->abort)(handle_);
}

bool Communicator::is_ready() const {
  NcclStatus status = NcclStatus::success;
  check(nccl().async_error(handle_, &status), "reading its status");
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

void by_nccl_or_fail(Group& group, std::span<const int> others, const WaitOptions& options,
                     const std::function<void()>& work, const std::function<void()>& drop) {
  try {
    // If the group has failed, its error is thrown, even if NCCL has reported that failure as an error of its own.
    const std::optional<Error> error = group::attempt(group, work);
    if (!error) return;
    // NCCL often notices a death before the group does, but the error of the group is more precise.
    const auto until = os::Clock::now() + std::chrono::seconds(1);
    group.wait_until(
        [&] { return os::Clock::now() >= until; },
        [](std::chrono::nanoseconds longest) {
          std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(longest, std::chrono::milliseconds(10)));
        },
        others, options);
    group::fail(group, group::error_of(group.info(group.rank()), error->kind(), error->what()));
  } catch (const Error&) {
    // A stream that waits for a dead rank would never become idle, so its communicator is aborted first.
    drop();
    throw;
  }
}

using collectives::CallSummary;

namespace {

/// The maximum number of devices per process.
constexpr std::size_t most_devices = 64;
/// How long the end of a group waits for the other ranks to end it.
constexpr std::chrono::seconds longest_end{1};

/// The record of a rank when devices connect.
struct Introduction {
  NcclId id{};  // of rank 0
  std::array<std::uint64_t, most_devices> devices{};
};
static_assert(sizeof(Introduction) <= Group::max_record);

}  // namespace

// Step 1.

std::uint64_t NcclCalls::identity_of(int device) {
  std::uint64_t& identity = identities_[device];
  if (identity == 0) identity = device_identity(device);
  return identity;
}

collectives::CallDevices NcclCalls::begin(std::span<const Device> devices) {
  lanes_.clear();
  is_captured_ = false;
  if (devices.size() > most_devices)
    throw Error(ErrorKind::invalid_argument, fmt::format("NCCL: a rank can have at most {} devices in one call, not {}",
                                                         most_devices, devices.size()));
  std::vector<std::uint64_t> identities;
  for (const Device& device : devices) {
    if (device.is_host())
      throw Error(ErrorKind::invalid_argument, "NCCL: a tensor is in host memory, but all must be on devices");
    if (std::ranges::find(lanes_, device.index, &DeviceCall::device) != lanes_.end())
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("NCCL: two tensors are on {}, but each device can have one", to_string(device)));
    const Current current(device.index);
    const CallersStream stream = look_at_callers_stream(device.index);
    is_captured_ = is_captured_ || stream.is_captured;
    lanes_.push_back({device.index, stream.handle});
    identities.push_back(identity_of(device.index));
  }
  if (is_captured_ && lanes_.size() > 1)
    throw Error(ErrorKind::unsupported,
                "NCCL: a call for several devices of a rank cannot be captured into a graph, because launching it may "
                "never return. Make the call outside of the capture");
  const std::uint64_t all = XXH3_64bits(identities.data(), identities.size() * sizeof(std::uint64_t));
  return {.devices = all, .count = static_cast<std::uint32_t>(lanes_.size()), .is_captured = is_captured_};
}

const NcclCalls::DeviceCall& NcclCalls::lane_of(const Device& device) const {
  const auto found = std::ranges::find(lanes_, device.index, &DeviceCall::device);
  if (device.is_host() || found == lanes_.end())
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format("NCCL: a tensor is on {}, and another one of the same call on cuda:{}: all must be on one device",
                    to_string(device), lanes_.front().device));
  return *found;
}

void NcclCalls::follow(const DeviceCall& lane) {
  const auto last = last_.find(lane.device);
  if (is_captured_ || last == last_.end()) return;
  const Current current(lane.device);
  check(driver().stream_wait_event(lane.stream, last->second.handle(), 0),
        "queueing behind the last call of the group");
}

void NcclCalls::note_last(const DeviceCall& lane) {
  if (is_captured_) return;
  const Current current(lane.device);
  last_.try_emplace(lane.device, lane.device).first->second.record(lane.stream);
}

// Step 2.

void NcclCalls::open(const CallSummary& card, const collectives::Opened& opened, const WaitOptions& options) {
  CallSummary mine = card;
  mine.on_devices.bytes = card.bytes;
  mine.bytes = mine.largest = 0;
  const std::vector<collectives::Room> nothing(static_cast<std::size_t>(group_.size()));
  const auto then = [&](std::span<const CallSummary> cards) {
    cards_.assign(cards.begin(), cards.end());
    for (CallSummary& each : cards_) each.bytes = each.on_devices.bytes;
    opened(cards_);
    // All ranks come to the same result.
    if (is_captured_ && met() == nullptr)
      throw Error(ErrorKind::invalid_argument,
                  "NCCL: connecting: the named stream is being captured into a graph. Make the same call on these "
                  "devices before the capture begins");
  };
  round_.all_gather(mine, then, {}, nothing, options);
}

// Step 3.

std::vector<int> NcclCalls::others() const {
  std::vector<int> ranks(group_.all().begin(), group_.all().end());
  std::erase(ranks, group_.rank());
  return ranks;
}

std::vector<std::uint64_t> NcclCalls::devices_of_all() const {
  std::vector<std::uint64_t> devices;
  for (const CallSummary& card : cards_) devices.push_back(card.on_devices.devices);
  return devices;
}

NcclCalls::Communicators* NcclCalls::met() {
  const auto found = met_.find(devices_of_all());
  return found == met_.end() ? nullptr : &found->second;
}

NcclCalls::Communicators& NcclCalls::meet(const WaitOptions& options) {
  if (Communicators* const known = met()) return *known;
  Introduction mine;
  group_.together(options, [&] {
    std::string reason;
    if (find_nccl(&reason) == nullptr) throw Error(ErrorKind::unsupported, reason);
    if (group_.rank() == 0) mine.id = make_nccl_id();
  });
  for (std::size_t i = 0; i < lanes_.size(); ++i) mine.devices[i] = identity_of(lanes_[i].device);
  std::vector<Introduction> all(cards_.size());
  group_.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), options);
  std::map<std::uint64_t, int> owners;
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      const auto [owner, is_first] = owners.try_emplace(all[rank].devices[i], static_cast<int>(rank));
      if (!is_first)
        throw Error(ErrorKind::unsupported,
                    fmt::format("NCCL: {} and {} use one device, but each rank needs its own. Give each rank its own "
                                "device (CUDA_VISIBLE_DEVICES), or copy the tensors to the host (copy_to_host)",
                                group::name_of(group_.info(owner->second)),
                                group::name_of(group_.info(static_cast<int>(rank)))));
    }
  Communicators communicators;
  const auto work = [&] {
    const auto begin = [&] {
      for (std::size_t i = 0; i < lanes_.size(); ++i) {
        const Current current(lanes_[i].device);
        communicators.push_back(std::make_unique<Communicator>(
            static_cast<int>(all.size() * lanes_.size()),
            static_cast<int>(static_cast<std::size_t>(group_.rank()) * lanes_.size() + i), all[0].id));
      }
    };
    // A single device needs no batch. NCCL would treat a batch as a different kind of call.
    if (lanes_.size() == 1)
      begin();
    else
      Communicator::batch(begin);
    wait_until_ready(communicators, "NCCL to connect to the other ranks", options);
  };
  by_nccl_or_fail(group_, others(), options, work, [&] { communicators.clear(); });
  return met_[devices_of_all()] = std::move(communicators);
}

void NcclCalls::wait_until_ready(const Communicators& communicators, const char* what, const WaitOptions& options) {
  const auto are_ready = [&] {
    bool all = true;
    for (const auto& each : communicators) all = each->is_ready() && all;
    return all;
  };
  wait_for_device(group_, are_ready, what, options, others());
}

// Step 4.

void NcclCalls::put(const WaitOptions& options, const Add& add) {
  Communicators& communicators = meet(options);
  const auto work = [&] {
    for (const DeviceCall& lane : lanes_) follow(lane);
    Communicator::batch([&] {
      for (std::size_t i = 0; i < lanes_.size(); ++i) {
        const Current current(lanes_[i].device);
        add(i, *communicators[i], lanes_[i].stream);
      }
    });
    wait_until_ready(communicators, "NCCL to accept the call", options);
    for (const DeviceCall& lane : lanes_) note_last(lane);
  };
  by_nccl_or_fail(group_, others(), options, work, [&] { abort(); });
}

// The end.

bool NcclCalls::are_ready() const {
  bool all = true;
  for (const auto& [devices, communicators] : met_)
    for (const auto& each : communicators) all = each->is_ready() && all;
  return all;
}

bool NcclCalls::have_ended() const {
  return std::ranges::all_of(last_, [](const auto& each) { return each.second.has_passed(); });
}

void NcclCalls::wait(const WaitOptions& options) {
  const auto work = [&] {
    // A failure between the devices does not end the work. NCCL reports it.
    wait_for_device(
        group_, [&] { return are_ready() && have_ended(); }, "its devices to finish the calls of the group", options,
        others());
  };
  by_nccl_or_fail(group_, others(), options, work, [&] { abort(); });
}

bool NcclCalls::try_close() {
  using Clock = os::Clock;
  const std::vector<int> ranks = others();
  // Polls with short sleeps until `done` is true, or can no longer become true.
  const auto comes = [&](const auto& done, Clock::duration longest) {
    const Clock::time_point until = Clock::now() + longest;
    while (!done()) {
      if (group_.error() || Clock::now() >= until) return false;
      if (std::ranges::any_of(ranks, [&](int rank) { return group_.liveness(rank)->is_dead(); })) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  };
  const auto with_all = [&](const auto& use) {
    for (const auto& [devices, communicators] : met_)
      for (const auto& each : communicators) use(*each);
  };
  if (!comes([&] { return are_ready() && have_ended(); }, group_.timeout())) return false;
  with_all([](Communicator& each) { each.begin_close(); });
  if (!comes([&] { return are_ready(); }, longest_end)) return false;
  with_all([](Communicator& each) { each.note_closed(); });
  return true;
}

NcclCalls::~NcclCalls() {
  try {
    // A forked child owns no communicator.
    if (!met_.empty() && find_driver() != nullptr) (void)try_close();
  } catch (const std::exception&) {
    // A device or NCCL has failed. Communicators that have not been closed are aborted.
  }
}

}  // namespace muster::cuda
