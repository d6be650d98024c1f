// SPDX-License-Identifier: Apache-2.0
#pragma once
// SharedArena: memory that tensors are allocated in from the start, so that a gather of them moves names only.

#include <cstdint>
#include <memory>

#include "muster/tensor.hpp"

namespace muster {

namespace detail {
class ArenaCore;
}

/// Anonymous shared memory of this process. Its tensors are ordinary tensors to their owner; a gather over shared
/// memory leases them to the first rank instead of copying. While leased they must not be written (the caller's error;
/// GatherOptions::debugging finds it). Dropping the last Tensor of an allocation frees it once every lease taken on
/// it has ended: never earlier, and without waiting. Thread-safe.
class SharedArena {
 public:
  /// `capacity` bytes at most for all tensors; memory is taken as it is touched. Throws Error(no_space) with needed and
  /// available bytes, Error(unsupported) if anonymous shared memory is not there.
  explicit SharedArena(std::uint64_t capacity);
  SharedArena(SharedArena&&) noexcept;
  SharedArena& operator=(SharedArena&&) noexcept;
  ~SharedArena();

  /// Writable, 64-byte aligned, not initialised. Keeps the arena's memory alive. Throws Error(no_space) with free and
  /// leased bytes.
  Tensor allocate(DType dtype, Shape shape);
  [[nodiscard]] std::uint64_t capacity() const noexcept;
  /// Bytes free for allocation now (freed but leased ones are not).
  [[nodiscard]] std::uint64_t available() const;
  /// Bytes freed by their owner and still leased by a first rank.
  [[nodiscard]] std::uint64_t waiting_for_leases() const;

 private:
  std::shared_ptr<detail::ArenaCore> core_;
};

}  // namespace muster
