// SPDX-License-Identifier: Apache-2.0
#pragma once
// CUDA IPC: a rank looks at another one's device memory on the same host. What is exported is a whole allocation;
// tensors are places in it. An allocation is known by its owner's buffer number, which is never used again: memory that
// was freed and allocated anew at the same address is told apart.

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "muster/tensor.hpp"
#include "src/device/driver.hpp"

namespace muster::cuda {

struct Export {
  std::uint64_t buffer = 0;
  std::uint64_t bytes = 0;
  IpcHandle handle{};
};

/// A sender's: what it has exported, and to whom.
class Exports {
 public:
  struct Found {
    Export exported;
    std::uint64_t offset = 0;  ///< of the tensor in the allocation
  };
  /// Throws Error(io) where the allocation cannot be exported.
  Found find(const TensorView& tensor);
  /// Buffers that `first` has been told of and that are freed by now: it must not keep them open. They are forgotten.
  std::vector<std::uint64_t> take_gone(int first);
  void note_told(int first, std::uint64_t buffer);

 private:
  struct Known {
    DevicePointer base = 0;
    Export exported;
  };
  std::map<DevicePointer, Known> known_;                      // by base
  std::map<int, std::map<std::uint64_t, const void*>> told_;  // by first rank: buffers, and where they were
};

/// The first rank's: allocations of senders, opened in this process. Kept open, because opening takes longer than
/// copying a small layer; closed when their owner says that they are gone, when they are too many, and at the end.
class OpenedMemory {
 public:
  ~OpenedMemory() { close_all(); }
  OpenedMemory& operator=(OpenedMemory&&) = delete;

  /// Opens it for `device`, or returns what is open already. Throws Error(io), in the driver's words, where these two
  /// devices cannot reach each other, or the sender's is hidden from this process. `in_use`: what was opened of this
  /// sender for the same exchange.
  DevicePointer open(int sender, const Export& exported, int device, std::span<const DevicePointer> in_use);
  void close(int sender, std::span<const std::uint64_t> buffers) noexcept;
  /// All of a sender's `but` these.
  void close_all_of(int sender, std::span<const DevicePointer> but = {}) noexcept;
  /// Those that were used longest ago, beyond what is kept from one exchange to the next. Nothing may be under way from
  /// them, nor from any in close_all().
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
