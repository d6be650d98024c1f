// SPDX-License-Identifier: Apache-2.0
#include "src/device/page_lock.hpp"

#include "src/device/contexts.hpp"

namespace muster::cuda {

std::shared_ptr<PageLock> PageLock::try_lock(int device, void* memory, std::size_t bytes, std::string& reason) {
  const Current current(device);
  const Status status = driver().host_register(memory, bytes, host_register_portable);
  if (status == Status::success) return std::shared_ptr<PageLock>(new PageLock(device, memory, bytes));
  reason = words_of(status);
  return nullptr;
}

PageLock::~PageLock() {
  on_device_if_there(device_, [&](const DriverFunctions& functions) { functions.host_unregister(memory_); });
}

}  // namespace muster::cuda
