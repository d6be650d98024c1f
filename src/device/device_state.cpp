// SPDX-License-Identifier: Apache-2.0
#include "src/device/device_state.hpp"

namespace muster::cuda {

CopyQueue& DeviceState::queue(int device) {
  std::unique_ptr<CopyQueue>& queue = queues[device];
  if (!queue) queue = std::make_unique<CopyQueue>(device);
  return *queue;
}

MemoryPool& DeviceState::memory_of(int device) {
  std::shared_ptr<MemoryPool>& pool = device_memory[device];
  if (!pool) pool = make_device_pool(device);
  return *pool;
}

std::uint64_t DeviceState::trim() noexcept {
  opened.close_all();
  std::uint64_t bytes = pinned->trim();
  for (const auto& [device, pool] : device_memory) bytes += pool->trim();
  return bytes;
}

std::uint64_t DeviceState::bytes() const {
  std::uint64_t sum = pinned->bytes();
  for (const auto& [device, pool] : device_memory) sum += pool->bytes();
  return sum;
}

std::shared_ptr<DeviceState> device_state_of(SyncGroup& group) {
  static const char key = 0;
  return std::static_pointer_cast<DeviceState>(group.extension(&key, [] { return std::make_shared<DeviceState>(); }));
}

}  // namespace muster::cuda
