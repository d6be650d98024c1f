// SPDX-License-Identifier: Apache-2.0
#include "src/os/pages.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <string>
#include <utility>

#include "src/base/message.hpp"
#include "src/os/fd.hpp"

namespace muster::os {
namespace {

constexpr std::uint64_t huge_page = 2 << 20;
constexpr std::uint64_t huge_from = 4 << 20;

Error no_room(std::uint64_t bytes) {
  return with_remedy(errno_error(ErrorKind::out_of_space, "memory: reserving " + byte_text(bytes), errno),
                     "Raise the limits of memory (ulimit -v, vm.max_map_count, overcommit)");
}

}  // namespace

PrivateMemory::PrivateMemory(std::uint64_t bytes) : size_(whole_pages(bytes, page_size())) {
  if (size_ == 0) return;
  // A huge page must be aligned to its size. The surplus before and after is unmapped.
  const std::uint64_t before = size_ < huge_from ? 0 : huge_page;
  void* area = size_ > UINT64_MAX - before
                   ? MAP_FAILED
                   : ::mmap(nullptr, size_ + before, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (area == MAP_FAILED) throw no_room(bytes);
  data_ = static_cast<std::byte*>(area);
  if (before == 0) return;
  const std::uint64_t skip = (huge_page - reinterpret_cast<std::uintptr_t>(area) % huge_page) % huge_page;
  if (skip != 0) ::munmap(data_, skip);
  if (skip != before) ::munmap(data_ + skip + size_, before - skip);
  data_ += skip;
  ::madvise(data_, size_, MADV_HUGEPAGE);
}

PrivateMemory::PrivateMemory(PrivateMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

PrivateMemory& PrivateMemory::operator=(PrivateMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

PrivateMemory::~PrivateMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

void PrivateMemory::grow(std::uint64_t bytes) {
  bytes = whole_pages(bytes, page_size());
  if (bytes <= size_) return;
  if (data_ == nullptr) {
    *this = PrivateMemory(bytes);
    return;
  }
  void* area = ::mremap(data_, size_, bytes, MREMAP_MAYMOVE);
  if (area == MAP_FAILED) throw no_room(bytes);
  data_ = static_cast<std::byte*>(area);
  size_ = bytes;
}

PrivateMemory PrivateMemory::split(std::uint64_t bytes) noexcept {
  PrivateMemory rest;
  bytes = whole_pages(bytes, page_size());
  if (bytes >= size_) return rest;
  if (bytes == 0) return std::exchange(*this, PrivateMemory());
  rest.data_ = data_ + bytes;
  rest.size_ = size_ - bytes;
  size_ = bytes;
  return rest;
}

}  // namespace muster::os
