// SPDX-License-Identifier: Apache-2.0
#pragma once
// The state that the device route keeps with a group: streams, memory, exported and opened allocations.

#include <map>
#include <memory>
#include <set>
#include "muster/cuda.hpp"
#include "src/cuda/copy_queue.hpp"
#include "src/cuda/ipc.hpp"
#include "src/cuda/memory_pool.hpp"
#include "src/cuda/nccl.hpp"
#include "src/group/group.hpp"

namespace muster::cuda {

struct DeviceState {
  std::map<int, std::unique_ptr<CopyQueue>> queues;          // by device
  std::map<int, std::shared_ptr<MemoryPool>> device_memory;  // by device; holds received tensors on the root
  std::shared_ptr<MemoryPool> pinned = make_pinned_pool();
  Exports exports;
  OpenedMemory opened;
  NcclLists nccl;
  std::set<int> takers;     // roots that have received this rank's memory by IPC
  bool has_warned = false;  // a warning that pages cannot be locked was logged

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
  /// Called when an exchange has failed midway: the remaining work of its streams is no longer used.
  void drop_queues() noexcept { queues.clear(); }
  /// Frees unused memory and closes opened allocations of other ranks. Returns the number of bytes of the memory.
  std::uint64_t trim() noexcept {
    opened.close_all();
    std::uint64_t bytes = pinned->trim();
    for (const auto& [device, pool] : device_memory) bytes += pool->trim();
    return bytes;
  }
  /// Returns the bytes of host and device memory, lent out or free.
  [[nodiscard]] std::uint64_t bytes() const {
    std::uint64_t sum = pinned->bytes();
    for (const auto& [device, pool] : device_memory) sum += pool->bytes();
    return sum;
  }
};

inline std::shared_ptr<DeviceState> device_state_of(SyncGroup& group) {
  return group::inside(group).extension<DeviceState>();
}

// The interface through which `muster doctor` calls libmuster-cuda, to which it is not linked.

inline constexpr const char* report_symbol = "muster_cuda_report";
/// Fills a report. Returns false if that failed for another reason than a missing driver.
using MakeReport = bool (*)(CudaReport& report);

}  // namespace muster::cuda
