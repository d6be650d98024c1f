// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pages: what the kernel gives, maps and takes back memory in. 4 KiB on most machines, 16 or 64 KiB on some.

#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace muster::os {

/// Of this machine.
inline std::uint64_t page_size() noexcept {
  static const auto size = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return size;
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

}  // namespace muster::os
