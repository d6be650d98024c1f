// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies from devices to host memory: into a slot of shared memory that the root reads, or into memory of this rank
// that another route sends. Parts of a stream (gather_each) are staged in the same way. If the root shares memory with
// the sender, they are copied directly into slots. Otherwise they use a page-locked buffer of one part, which is
// reused.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/config.hpp"
#include "src/core/descriptor.hpp"
#include "src/cuda/device_state.hpp"
#include "src/gather/route.hpp"

namespace muster::cuda {

/// Fills slots. The pages of a slot are locked at its first use, and remain locked as long as the slot has its memory.
/// If they cannot be locked, small buffers are used.
class DeviceSlotFiller final : public gather::SlotFiller {
 public:
  DeviceSlotFiller(const gather::GatherCall& call, DeviceState& state) : call_(call), state_(state) {}
  void fill(const std::shared_ptr<shm::Slot>& slot, std::uint64_t bytes,
            std::span<const std::pair<std::uint64_t, const Tensor*>> tensors) override;
  /// Returns a description of the copy for reports: "page-locked shared memory".
  [[nodiscard]] const std::string& manner() const noexcept { return manner_; }

 private:
  const gather::GatherCall& call_;
  DeviceState& state_;
  std::string manner_;
};

/// A host copy of a tree whose tensors are on devices. Its shape is complete before its elements are.
class HostCopy {
 public:
  /// Allocates the memory; `state` then has at most `budget` bytes. `value` must stay valid until finish(). Throws
  /// Error(out_of_space), and Error(invalid_argument) for strides that a device cannot copy.
  HostCopy(const Config& value, DeviceState& state, std::uint64_t budget = UINT64_MAX);
  [[nodiscard]] const Config& tree() const noexcept { return tree_; }
  [[nodiscard]] Config take() noexcept { return std::move(tree_); }
  /// Queues the copies in the streams of their devices.
  void start();
  /// Waits until all elements have been copied. Throws as CopyQueue::finish.
  void finish(Group& group, const WaitOptions& options);

 private:
  struct StagedPart {
    const Tensor* from;
    std::byte* to;
  };
  DeviceState& state_;
  MemoryPool::Buffer buffer_;
  core::SlotLayout layout_;
  std::vector<StagedPart> parts_;
  Config tree_;
};

/// Returns the tree with `replace(tensor)` in place of every tensor that has elements and is on a device.
Config with_tensors(const Config& value, const std::function<Tensor(const Tensor&)>& replace);
/// Returns the tree with every tensor replaced.
Config with_all_tensors(const Config& value, const std::function<Tensor(const Tensor&)>& replace);
/// Calls `visit` for every tensor that has elements and is on a device, in the order of the tree.
void visit_device_tensors(const Config& value, const std::function<void(const Tensor&)>& visit);

/// Throws Error(invalid_argument) if a tensor is not on the device that it names.
void check_places(const Config& value);

/// Frees the unused buffers that streams of this group keep for their parts. Returns the number of bytes. `group` is
/// the group that transfers the parts.
std::uint64_t trim_stream_staging(Group& group) noexcept;

}  // namespace muster::cuda
