// SPDX-License-Identifier: Apache-2.0
#pragma once
// From devices to host memory: into a slot of shared memory that the first rank looks at, or into memory of this rank's
// own that another route sends on. So come the parts of a stream (gather_each), too: straight into the slots that the
// first rank looks at where it shares memory with the sender, else through page-locked memory of one part, which is
// used again.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/config.hpp"
#include "src/core/descriptor.hpp"
#include "src/device/device_state.hpp"
#include "src/gather/route.hpp"

namespace muster::cuda {

/// Fills slots: their pages are locked when they are first used, and stay so as long as the slot has its memory. Where
/// they cannot be locked, through small buffers.
class DeviceSlotFiller final : public gather::SlotFiller {
 public:
  DeviceSlotFiller(const gather::Call& call, DeviceState& state) : call_(call), state_(state) {}
  void fill(const std::shared_ptr<shm::Slot>& slot, std::uint64_t bytes,
            std::span<const std::pair<std::uint64_t, const Tensor*>> tensors) override;
  /// How the bytes went, for reports: "page-locked shared memory".
  [[nodiscard]] const std::string& manner() const noexcept { return manner_; }

 private:
  const gather::Call& call_;
  DeviceState& state_;
  std::string manner_;
};

/// A tree whose tensors are on devices, copied to the host. The copy has its shape before it has its elements.
class HostCopy {
 public:
  /// Takes the memory, of which `state` has at most `budget` bytes then. `value` stays until finish(). Throws
  /// Error(no_space), Error(argument) on strides that a device cannot copy.
  HostCopy(const Config& value, DeviceState& state, std::uint64_t budget = UINT64_MAX);
  [[nodiscard]] const Config& tree() const noexcept { return tree_; }
  [[nodiscard]] Config take() noexcept { return std::move(tree_); }
  /// Puts the copies into the streams of their devices.
  void start();
  /// Returns when all elements are there. Throws as CopyQueue::finish.
  void finish(SyncGroup& group, const WaitOptions& options);

 private:
  struct Part {
    const Tensor* from;
    std::byte* to;
  };
  DeviceState& state_;
  MemoryPool::Buffer buffer_;
  core::SlotLayout layout_;
  std::vector<Part> parts_;
  Config tree_;
};

/// The tree with every tensor that has elements and is on a device replaced by `replace(tensor)`.
Config with_tensors(const Config& value, const std::function<Tensor(const Tensor&)>& replace);
/// The tree with every tensor replaced.
Config with_all_tensors(const Config& value, const std::function<Tensor(const Tensor&)>& replace);
/// Calls `visit` for these tensors, in the order of the tree.
void visit_device_tensors(const Config& value, const std::function<void(const Tensor&)>& visit);

/// Throws Error(argument) where a tensor that is said to be on a device is not there.
void check_places(const Config& value);

/// Gives back what streams of this group keep for their parts, where nothing uses it; returns the bytes. `group`: the
/// one that parts go by.
std::uint64_t trim_stream_staging(SyncGroup& group) noexcept;

}  // namespace muster::cuda
