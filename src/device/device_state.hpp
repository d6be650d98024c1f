// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the device route keeps with a group: streams, memory, what was exported and opened.

#include <map>
#include <memory>
#include <set>

#include "muster/sync_group.hpp"
#include "src/device/copy_queue.hpp"
#include "src/device/ipc.hpp"
#include "src/device/memory_pool.hpp"
#include "src/device/nccl_lists.hpp"

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

  CopyQueue& queue(int device);
  MemoryPool& memory_of(int device);
  /// An exchange has failed in the middle: what its streams still do is nobody's any more.
  void drop_queues() noexcept { queues.clear(); }
  /// Gives back what can be: free memory, opened allocations of others. Returns the bytes of memory.
  std::uint64_t trim() noexcept;
  /// Memory of the host and of devices, lent out or free.
  [[nodiscard]] std::uint64_t bytes() const;
};

std::shared_ptr<DeviceState> device_state_of(SyncGroup& group);

}  // namespace muster::cuda
