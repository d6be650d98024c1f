// SPDX-License-Identifier: Apache-2.0
#pragma once
// SharedArena: shared memory for tensors. A gather of such tensors transfers only references.

#include <cstdint>
#include <memory>

#include "muster/tensor.hpp"

namespace muster {

namespace detail {
class ArenaCore;
}

/// Anonymous shared memory of this process. Its tensors are ordinary tensors to their owner. A gather over shared
/// memory leases them to the root instead of copying them. The owner must not write to a leased tensor;
/// GatherOptions::debugging detects such writes. After the last Tensor of an allocation is destroyed, its memory is
/// freed when every lease on it has ended. Destroying a Tensor does not wait for leases. Thread-safe.
class SharedArena {
 public:
  /// Creates an arena of `capacity` bytes for all its tensors. The system allocates the memory when it is first
  /// accessed. Throws Error(out_of_space) with the needed and available bytes, and Error(unsupported) if anonymous
  /// shared memory is not available.
  explicit SharedArena(std::uint64_t capacity);
  SharedArena(SharedArena&&) noexcept;
  SharedArena& operator=(SharedArena&&) noexcept;
  ~SharedArena();

  /// Allocates writable uninitialized memory, aligned to 64 bytes. The tensor keeps the memory of the arena alive.
  /// Throws Error(out_of_space) with the free and the leased bytes.
  Tensor allocate(DType dtype, Shape shape);
  /// Returns the capacity in bytes.
  [[nodiscard]] std::uint64_t capacity() const noexcept;
  /// Returns the bytes that can be allocated now. Memory that is freed but still leased is not included.
  [[nodiscard]] std::uint64_t available() const;
  /// Returns the bytes that their owner has freed and that a root still leases.
  [[nodiscard]] std::uint64_t waiting_for_leases() const;

 private:
  std::shared_ptr<detail::ArenaCore> core_;
};

}  // namespace muster
