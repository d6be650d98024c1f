// SPDX-License-Identifier: Apache-2.0
#pragma once
// Page locks: somebody's memory that devices shall copy into at the full speed of the bus.

#include <cstddef>
#include <memory>
#include <string>

namespace muster::cuda {

/// Pages that are locked as long as this lives. They must not be given back to the system meanwhile: the device would
/// go on writing into pages that nobody sees any more.
class PageLock {
 public:
  /// For all devices, by way of this one. Null where the driver refuses (limits of the container, memory that it cannot
  /// lock), and why in `reason`.
  static std::shared_ptr<PageLock> try_lock(int device, void* memory, std::size_t bytes, std::string& reason);
  ~PageLock();
  PageLock(const PageLock&) = delete;
  PageLock& operator=(const PageLock&) = delete;
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  PageLock(int device, void* memory, std::size_t bytes) noexcept : device_(device), memory_(memory), bytes_(bytes) {}
  int device_;
  void* memory_;
  std::size_t bytes_;
};

}  // namespace muster::cuda
