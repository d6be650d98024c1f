// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies of one rank from and to one of its devices: put into a stream of our own, in pieces, and waited for by the
// CPU.
//
//  1. follow_caller(): what the caller has queued before the exchange comes first. The device waits for it, not the
//     CPU.
//  2. to_host(), to_device(), on_device(): pieces of at most `piece_bytes`, each followed by an event.
//  3. finish(): the CPU asks for the events one after another; each that has passed is progress of this rank.
// What a device copies in one go are rows of bytes at one distance (Pitched).
// Queues of several devices are filled before the first of them is waited for: their copies run beside each other.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "muster/sync_group.hpp"
#include "muster/tensor.hpp"
#include "src/device/memory_pool.hpp"
#include "src/device/stream.hpp"

namespace muster::cuda {

/// `rows` runs of `width` bytes, `pitch` bytes from one to the next.
struct Pitched {
  std::uint64_t width = 0;
  std::uint64_t rows = 1;
  std::uint64_t pitch = 0;  ///< at least the width
  friend bool operator==(const Pitched&, const Pitched&) = default;
};

/// None where the strides are not so: elements with gaps between them in more than one dimension, in another order
/// than row-major, or more than once. Pure.
std::optional<Pitched> pitched(const TensorView& view);

/// The same, with Error(argument) that says what to do instead.
Pitched require_pitched(const TensorView& view);

/// Between two signs of progress: long against the cost of an event, short against any deadline.
inline constexpr std::uint64_t piece_bytes = 32 << 20;

/// What takes part in a stream besides its device.
struct OthersInStream {
  std::span<const int> ranks = {};     ///< whose devices do
  std::function<void()> look = [] {};  ///< throws where it has failed: asked as often as the device
};

class CopyQueue {
 public:
  explicit CopyQueue(int device) : stream_(device), kept_(std::make_unique<Kept>()) {}
  /// What is still under way keeps its memory and its stream until the process ends.
  ~CopyQueue();
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  [[nodiscard]] int device() const noexcept { return stream_.device(); }
  [[nodiscard]] StreamHandle stream() const noexcept { return stream_.handle(); }

  void follow_caller() { follow_caller(device()); }
  /// What it has queued on another device of this process.
  void follow_caller(int device);
  /// `target` is page-locked and has room for source.nbytes(). Throws Error(argument) on strides that cannot be copied.
  void to_host(const TensorView& source, std::byte* target);
  /// `source` is page-locked.
  void to_device(const std::byte* source, DevicePointer target, std::uint64_t bytes);
  /// From one device, or one opened allocation, to another.
  void on_device(DevicePointer source, DevicePointer target, std::uint64_t bytes);
  /// `memory` is touched by what is in the queue: it lives until that is over.
  void keep(std::shared_ptr<const void> memory) { kept_->memory.push_back(std::move(memory)); }
  /// Something else has been put into the stream.
  void mark();

  /// Returns when all is done. Throws Error(io) where the device has failed, and as wait_for_device.
  void finish(SyncGroup& group, const WaitOptions& options, const OthersInStream& others = {});

  /// For ordinary memory, of which the driver would make its own copies while the CPU waits inside of it: through two
  /// small page-locked buffers in turns, so that one is filled while the other one is emptied. Return when it is done.
  void bounce_to_host(const TensorView& source, std::byte* target, MemoryPool& pinned, SyncGroup& group,
                      const WaitOptions& options);
  void bounce_to_device(const std::byte* source, DevicePointer target, std::uint64_t bytes, MemoryPool& pinned,
                        SyncGroup& group, const WaitOptions& options);

 private:
  void copied(std::uint64_t bytes);
  void wait_for_first(SyncGroup& group, const WaitOptions& options, const OthersInStream& others = {});

  Stream stream_;
  std::deque<Event> marks_;
  std::vector<Event> spare_;
  std::uint64_t unmarked_ = 0;
  bool has_unmarked_ = false;
  struct Kept {
    std::vector<std::shared_ptr<const void>> memory;
    Kept* next = nullptr;
  };
  static void hold_for_ever(std::unique_ptr<Kept> kept) noexcept;
  std::unique_ptr<Kept> kept_;
};

}  // namespace muster::cuda
