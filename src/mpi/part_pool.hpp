// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory of the first rank for parts of a stream: buffers of one size, used again, so that what a stream holds is what
// its budget says and no page is faulted in twice.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "src/os/pages.hpp"

namespace muster::mpi {

/// Counts buffers that were given back: a sender's credits. Any thread.
using Credits = std::shared_ptr<std::atomic<std::uint64_t>>;

/// Thread-safe. Buffers outlive it.
class PartPool : public std::enable_shared_from_this<PartPool> {
 public:
  /// Buffers of other streams go, when nobody holds them any more.
  void set_size(std::uint64_t bytes);
  /// One buffer. When its last owner goes, it is free again, and `credits` grows by one. Throws Error(no_space).
  std::shared_ptr<std::byte> take(const Credits& credits);
  /// Of buffers of this size that are free or lent, and the most there ever were.
  [[nodiscard]] std::uint64_t bytes() const;
  [[nodiscard]] std::uint64_t peak() const;
  /// Free ones go back to the system; returns their bytes.
  std::uint64_t trim();
  /// What is lent no longer counts, and goes when it is given back. Returns the bytes that stay.
  std::uint64_t settle();

 private:
  struct Lent;
  void give_back(os::PrivateMemory memory, std::uint64_t epoch) noexcept;

  mutable std::mutex mutex_;
  std::uint64_t size_ = 0;
  std::uint64_t epoch_ = 0;  // of buffers that belong to this pool: those of earlier ones do not come back
  std::uint64_t lent_ = 0;
  std::uint64_t peak_ = 0;
  std::vector<os::PrivateMemory> free_;  // the one used last at the end
};

}  // namespace muster::mpi
