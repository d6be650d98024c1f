// SPDX-License-Identifier: Apache-2.0
#pragma once
// CUDA IPC: a rank accesses device memory of another rank on the same host. Whole allocations are exported; tensors are
// places in them. An allocation is identified by the buffer number of its owner, which is never reused. So memory that
// was freed and allocated again at the same address is a different allocation.

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "muster/tensor.hpp"
#include "src/cuda/driver.hpp"

namespace muster::cuda {

struct ExportedBuffer {
  std::uint64_t buffer = 0;
  std::uint64_t bytes = 0;
  IpcHandle handle{};
};

/// A sender's exported allocations, and the roots that know them.
class Exports {
 public:
  struct FoundBuffer {
    ExportedBuffer exported;
    std::uint64_t offset = 0;  ///< of the tensor in the allocation
  };
  /// Throws Error(io) if the allocation cannot be exported.
  FoundBuffer find(const TensorView& tensor);
  /// Returns and forgets the buffers that root `first` knows and that have been freed. The root must close them.
  std::vector<std::uint64_t> take_gone(int first);
  void note_told(int first, std::uint64_t buffer);

 private:
  struct KnownBuffer {
    DevicePointer base = 0;
    ExportedBuffer exported;
  };
  std::map<DevicePointer, KnownBuffer> known_;                // by base
  std::map<int, std::map<std::uint64_t, const void*>> told_;  // by root: the buffers and their addresses
};

/// Allocations of senders that the root has opened in this process. They are kept open, because opening takes longer
/// than copying a small layer. They are closed when their owner reports that they were freed, when there are too many,
/// and at the end.
class OpenedMemory {
 public:
  ~OpenedMemory() { close_all(); }
  OpenedMemory& operator=(OpenedMemory&&) = delete;

  /// Opens the allocation for `device`, or returns the pointer if it is open already. `in_use` contains the allocations
  /// of this sender that were opened for the same exchange. Throws Error(io) with the driver's message if the two
  /// devices cannot access each other, or if the sender's device is hidden from this process.
  DevicePointer open(int sender, const ExportedBuffer& exported, int device, std::span<const DevicePointer> in_use);
  void close(int sender, std::span<const std::uint64_t> buffers) noexcept;
  /// Closes all allocations of a sender, except those in `but`.
  void close_all_of(int sender, std::span<const DevicePointer> but = {}) noexcept;
  /// Closes the least recently used allocations beyond the number that is kept between exchanges. No copy from them may
  /// be in progress. This also holds for close_all().
  void close_surplus() noexcept;
  void close_all() noexcept;

 private:
  struct Key {
    int sender;
    std::uint64_t buffer;
    int device;
    friend auto operator<=>(const Key&, const Key&) = default;  // NOLINT(modernize-use-nullptr): takes <=> 0 for one
  };
  struct Opened {
    DevicePointer pointer = 0;
    std::uint64_t used = 0;
  };
  std::map<Key, Opened> open_;
  std::uint64_t uses_ = 0;
};

}  // namespace muster::cuda
