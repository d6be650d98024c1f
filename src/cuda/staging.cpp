// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/staging.hpp"

#include <fmt/core.h>

#include <optional>
#include <set>

#include "muster/log.hpp"
#include "src/shm/slot.hpp"

namespace muster::cuda {
namespace {

bool is_on_device(const Tensor& tensor) {
  return !tensor.device().is_host() && tensor.nbytes() != 0;
}

/// Locks pages while this object exists, so that devices copy into them at the full speed of the bus. The pages must
/// not be returned to the system meanwhile: the device would continue to write into pages that are no longer mapped.
class PageLock {
 public:
  /// Locks the memory for all devices, through this one. Returns null and sets `reason` if the driver refuses (limits
  /// of the container, memory that cannot be locked).
  static std::shared_ptr<PageLock> try_lock(int device, void* memory, std::size_t bytes, std::string& reason) {
    const Current current(device);
    const Status status = driver().host_register(memory, bytes, host_register_portable);
    if (status == Status::success) return std::shared_ptr<PageLock>(new PageLock(device, memory, bytes));
    reason = words_of(status);
    return nullptr;
  }
  ~PageLock() {
    on_device_if_there(device_, [&](const DriverFunctions& functions) { functions.host_unregister(memory_); });
  }
  PageLock& operator=(PageLock&&) = delete;
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  PageLock(int device, void* memory, std::size_t bytes) noexcept : device_(device), memory_(memory), bytes_(bytes) {}
  int device_;
  void* memory_;
  std::size_t bytes_;
};

/// Returns the lock of the first `bytes` of the slot, or null if they cannot be locked.
std::shared_ptr<PageLock> lock_pages(int device, shm::Slot& slot, std::uint64_t bytes, std::string& reason) {
  auto there = std::static_pointer_cast<PageLock>(slot.segment().attachment());
  if (there && there->bytes() >= bytes) return there;
  // The old lock is released first, because pages can be locked only once.
  there.reset();
  slot.segment().attach(nullptr);
  std::shared_ptr<PageLock> lock = PageLock::try_lock(device, slot.segment().data(), bytes, reason);
  slot.segment().attach(lock);
  return lock;
}

}  // namespace

void DeviceSlotFiller::fill(const std::shared_ptr<shm::Slot>& slot, std::uint64_t bytes,
                            std::span<const std::pair<std::uint64_t, const Tensor*>> tensors) {
  Group& group = *call_.group;
  const WaitOptions wait = call_.wait("gather: copying from devices");
  slot->take(bytes);
  std::set<int> devices;
  for (const auto& [offset, tensor] : tensors)
    if (is_on_device(*tensor)) devices.insert(tensor->device().index);
  for (const int device : devices) state_.queue(device).follow_caller();
  std::string reason;
  std::shared_ptr<PageLock> lock;
  if (!devices.empty()) lock = lock_pages(*devices.begin(), *slot, bytes, reason);
  manner_ = lock ? "page-locked shared memory" : "buffers, because shared memory cannot be page-locked: " + reason;
  if (!lock && !std::exchange(state_.has_warned, true))
    log(LogLevel::warning, fmt::format("rank {}: copies from devices use buffers, because shared memory cannot be "
                                       "page-locked ({}). Check the limits of the container",
                                       group.rank(), reason));
  for (const int device : devices) state_.queue(device).keep(slot);
  for (const auto& [offset, tensor] : tensors) {
    if (!is_on_device(*tensor)) continue;
    CopyQueue& queue = state_.queue(tensor->device().index);
    std::byte* const target = slot->segment().data() + offset;
    if (lock)
      queue.to_host(*tensor, target);
    else
      queue.bounce_to_host(*tensor, target, *state_.pinned, group, wait);
  }
  for (const int device : devices) state_.queue(device).finish(group, wait);
}

HostCopy::HostCopy(const Config& value, DeviceState& state, std::uint64_t budget) : state_(state) {
  core::SlotLayout sizes;
  std::optional<int> device;
  visit_device_tensors(value, [&](const Tensor& tensor) {
    (void)require_pitched(tensor.view());
    device = tensor.device().index;
    sizes.place(tensor.nbytes());
  });
  if (device) {
    const Current current(*device);
    buffer_ = state_.pinned->take(sizes.size(), budget);
  }
  tree_ = with_tensors(value, [&](const Tensor& tensor) -> Tensor {
    std::byte* const to = buffer_.data.get() + layout_.place(tensor.nbytes());
    parts_.push_back({&tensor, to});
    return {TensorView(tensor.dtype(), tensor.shape(), to), buffer_.data};
  });
}

void HostCopy::start() {
  std::set<int> devices;
  for (const StagedPart& part : parts_) devices.insert(part.from->device().index);
  for (const int device : devices) {
    state_.queue(device).follow_caller();
    state_.queue(device).keep(buffer_.data);
  }
  if (!buffer_.is_locked) return;
  for (const StagedPart& part : parts_) state_.queue(part.from->device().index).to_host(*part.from, part.to);
}

void HostCopy::finish(Group& group, const WaitOptions& options) {
  if (!buffer_.is_locked)
    for (const StagedPart& part : parts_)
      state_.queue(part.from->device().index).bounce_to_host(*part.from, part.to, *state_.pinned, group, options);
  for (const StagedPart& part : parts_) state_.queue(part.from->device().index).finish(group, options);
}

Config with_all_tensors(const Config& value, const std::function<Tensor(const Tensor&)>& replace) {
  return map_leaves(value,
                    [&](const Config& leaf) -> Config { return leaf.is_tensor() ? replace(leaf.as_tensor()) : leaf; });
}

Config with_tensors(const Config& value, const std::function<Tensor(const Tensor&)>& replace) {
  return with_all_tensors(value, [&](const Tensor& tensor) { return is_on_device(tensor) ? replace(tensor) : tensor; });
}

void visit_device_tensors(const Config& value, const std::function<void(const Tensor&)>& visit) {
  for_each_leaf(value, [&](const Config& leaf) {
    if (leaf.is_tensor() && is_on_device(leaf.as_tensor())) visit(leaf.as_tensor());
  });
}

void check_places(const Config& value) {
  visit_device_tensors(value, [](const Tensor& tensor) { (void)locate(tensor.view()); });
}

namespace {

/// Separate from the state of the device route: its memory is not memory for slots, and is not counted as such.
struct StagingState : DeviceState {};

std::shared_ptr<DeviceState> staging_state_of(Group& group) {
  return group::inside(group).extension<StagingState>();
}

/// If `work` fails, drops the streams, so that the next part does not wait for the remaining work in them.
template <class Work>
auto whole_or_dropped(DeviceState& state, const Work& work) {
  try {
    return work();
  } catch (...) {
    state.drop_queues();
    throw;
  }
}

class PartFiller final : public gather::SlotFiller {
 public:
  explicit PartFiller(const gather::GatherCall& call) : state_(staging_state_of(*call.group)), filler_(call, *state_) {}
  void fill(const std::shared_ptr<shm::Slot>& slot, std::uint64_t bytes,
            std::span<const std::pair<std::uint64_t, const Tensor*>> tensors) override {
    whole_or_dropped(*state_, [&] { filler_.fill(slot, bytes, tensors); });
  }

 private:
  std::shared_ptr<DeviceState> state_;
  DeviceSlotFiller filler_;
};

class StreamStaging final : public gather::HostStaging {
 public:
  std::unique_ptr<gather::SlotFiller> filler(const gather::GatherCall& call) const override {
    check_places(*call.value);
    return std::make_unique<PartFiller>(call);
  }
  Config to_host(const Config& part, Group& group, const WaitOptions& options) const override {
    check_places(part);
    DeviceState& state = *staging_state_of(group);
    return whole_or_dropped(state, [&] {
      HostCopy copy(part, state);
      copy.start();
      copy.finish(group, options);
      return copy.take();
    });
  }
  [[nodiscard]] std::uint64_t bytes(Group& group) const override { return staging_state_of(group)->bytes(); }
};

const bool is_staging_registered = [] {
  gather::RouteTable::instance().set_staging(std::make_unique<StreamStaging>());
  return true;
}();

}  // namespace

std::uint64_t trim_stream_staging(Group& group) noexcept {
  return staging_state_of(group)->trim();
}

}  // namespace muster::cuda
