// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pages: what the kernel gives, maps and takes back memory in. 4 KiB on most machines, 16 or 64 KiB on some.
// And memory of this process alone, taken page by page as it is touched, grown without copying.

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace muster::os {

/// Of this machine.
inline std::uint64_t page_size() noexcept {
  static const auto size = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

/// Bytes of the last cache, which the cores share; 32 MiB if the machine does not tell.
inline std::uint64_t last_level_cache() noexcept {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
  const long bytes = 0;
#endif
  return bytes > 0 ? static_cast<std::uint64_t>(bytes) : 32U << 20;
}

/// `bytes` rounded up to whole pages; down where no number is that large.
constexpr std::uint64_t whole_pages(std::uint64_t bytes, std::uint64_t page) noexcept {
  return bytes > UINT64_MAX - page ? UINT64_MAX / page * page : (bytes + page - 1) / page * page;
}

/// Addresses [begin, end).
struct AddressRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  friend bool operator==(const AddressRange&, const AddressRange&) = default;
};

/// All pages that have something of the range.
constexpr AddressRange pages_around(AddressRange range, std::uint64_t page) noexcept {
  return {range.begin / page * page, whole_pages(range.end, page)};
}

/// The pages that have nothing but the range; their end is not before their begin.
constexpr AddressRange pages_within(AddressRange range, std::uint64_t page) noexcept {
  const std::uint64_t begin = whole_pages(range.begin, page);
  return {begin, std::max(begin, range.end / page * page)};
}

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
