// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pages: the unit in which the kernel allocates, maps and frees memory. 4 KiB on most machines, 16 or 64 KiB on some.
// Also private memory of this process, which is allocated page by page when it is touched, and grows without copying.

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace muster::os {

/// Returns the page size of this machine.
inline std::uint64_t page_size() noexcept {
  static const auto size = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

/// Returns the size of the last-level cache, which the cores share; 32 MiB if the system does not report it.
inline std::uint64_t last_level_cache() noexcept {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
  const long bytes = 0;
#endif
  return bytes > 0 ? static_cast<std::uint64_t>(bytes) : 32U << 20;
}

/// Returns `bytes` rounded up to whole pages, or down if the result would overflow.
constexpr std::uint64_t whole_pages(std::uint64_t bytes, std::uint64_t page) noexcept {
  return bytes > UINT64_MAX - page ? UINT64_MAX / page * page : (bytes + page - 1) / page * page;
}

/// Addresses [begin, end).
struct AddressRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  friend bool operator==(const AddressRange&, const AddressRange&) = default;
};

/// Returns all pages that overlap the range.
constexpr AddressRange pages_around(AddressRange range, std::uint64_t page) noexcept {
  return {range.begin / page * page, whole_pages(range.end, page)};
}

/// Returns the pages that are completely inside the range; `end` is never less than `begin`.
constexpr AddressRange pages_within(AddressRange range, std::uint64_t page) noexcept {
  const std::uint64_t begin = whole_pages(range.begin, page);
  return {begin, std::max(begin, range.end / page * page)};
}

/// Private memory of this process. Movable; the destructor unmaps it.
class PrivateMemory {
 public:
  PrivateMemory() noexcept = default;
  /// Allocates `bytes` bytes (rounded up to pages), initially zero. From 4 MiB on it uses huge pages if the kernel
  /// provides them, which costs one page fault per 2 MiB instead of one per 4 KiB. Throws Error(out_of_space).
  explicit PrivateMemory(std::uint64_t bytes);
  PrivateMemory(PrivateMemory&& other) noexcept;
  PrivateMemory& operator=(PrivateMemory&& other) noexcept;
  ~PrivateMemory();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  /// Enlarges the memory, possibly at another address. Touched pages are kept without copying. Throws
  /// Error(out_of_space).
  void grow(std::uint64_t bytes);
  /// Cuts off the memory after `bytes` bytes (rounded up to pages) and returns it.
  PrivateMemory split(std::uint64_t bytes) noexcept;

 private:
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

}  // namespace muster::os
