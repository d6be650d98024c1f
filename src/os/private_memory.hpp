// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory of this process alone, as the kernel gives it: taken page by page as it is touched, grown without copying.

#include <cstddef>
#include <cstdint>

namespace muster::os {

/// Bytes that no other process sees. Moves, and unmaps.
class PrivateMemory {
 public:
  PrivateMemory() noexcept = default;
  /// `bytes` (rounded up to pages), zero until written; from 4 MiB on in huge pages where the kernel gives them, which
  /// costs a page fault for 2 MiB instead of one for 4 KiB. Throws Error(no_space).
  explicit PrivateMemory(std::uint64_t bytes);
  PrivateMemory(PrivateMemory&& other) noexcept;
  PrivateMemory& operator=(PrivateMemory&& other) noexcept;
  ~PrivateMemory();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  /// More of it, perhaps elsewhere; what was touched stays, and is not copied. Throws Error(no_space).
  void grow(std::uint64_t bytes);
  /// Cuts off what is behind `bytes` (rounded up to pages) and returns it.
  PrivateMemory split(std::uint64_t bytes) noexcept;

 private:
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

}  // namespace muster::os
