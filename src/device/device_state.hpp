// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the device route keeps with a group: streams, memory, what was exported and opened.

#include <map>
#include <memory>
#include <set>

#include "src/device/copy_queue.hpp"
#include "src/device/ipc.hpp"
#include "src/device/memory_pool.hpp"
#include "src/device/nccl.hpp"
#include "src/sync/group.hpp"

namespace muster::cuda {

struct DeviceState {
  std::map<int, std::unique_ptr<CopyQueue>> queues;          // by device
  std::map<int, std::shared_ptr<MemoryPool>> device_memory;  // what has landed on the first rank
  std::shared_ptr<MemoryPool> pinned = make_pinned_pool();
  Exports exports;
  OpenedMemory opened;
  NcclLists nccl;
  std::set<int> takers;     // first ranks that have taken this rank's memory by IPC
  bool has_warned = false;  // that pages cannot be locked

  CopyQueue& queue(int device) {
    std::unique_ptr<CopyQueue>& queue = queues[device];
    if (!queue) queue = std::make_unique<CopyQueue>(device);
    return *queue;
  }
  MemoryPool& memory_of(int device) {
    std::shared_ptr<MemoryPool>& pool = device_memory[device];
    if (!pool) pool = make_device_pool(device);
    return *pool;
  }
  /// An exchange has failed in the middle: what its streams still do is nobody's any more.
  void drop_queues() noexcept { queues.clear(); }
  /// Gives back what can be: free memory, opened allocations of others. Returns the bytes of memory.
  std::uint64_t trim() noexcept {
    opened.close_all();
    std::uint64_t bytes = pinned->trim();
    for (const auto& [device, pool] : device_memory) bytes += pool->trim();
    return bytes;
  }
  /// Memory of the host and of devices, lent out or free.
  [[nodiscard]] std::uint64_t bytes() const {
    std::uint64_t sum = pinned->bytes();
    for (const auto& [device, pool] : device_memory) sum += pool->bytes();
    return sum;
  }
};

inline std::shared_ptr<DeviceState> device_state_of(SyncGroup& group) {
  return sync::inside(group).extension<DeviceState>();
}

}  // namespace muster::cuda
