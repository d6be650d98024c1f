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
// The CPU waits for its device with the group's deadline, and hears of the group's failures meanwhile. Streams and
// events that are destroyed when the driver has gone already, or in a forked child, are only forgotten.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "muster/sync_group.hpp"
#include "muster/tensor.hpp"
#include "src/device/driver.hpp"
#include "src/device/memory_pool.hpp"

namespace muster::cuda {

/// A mark in a stream, without a time.
class Event {
 public:
  explicit Event(int device);
  ~Event();
  Event(Event&& other) noexcept : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  /// Behind everything that is in `stream` now. The event's device must be current.
  void record(StreamHandle stream);
  /// Whether the stream has come there. Throws Error(io) where the device has failed.
  [[nodiscard]] bool has_passed() const;
  [[nodiscard]] EventHandle handle() const noexcept { return handle_; }

 private:
  int device_;
  EventHandle handle_ = nullptr;
};

/// A stream that waits for no other, the default one neither.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  Stream& operator=(Stream&&) = delete;
  [[nodiscard]] StreamHandle handle() const noexcept { return handle_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  /// What is put into it from now on begins when `event` has passed; the CPU does not wait.
  void wait_for(const Event& event);
  /// Nothing is left to do in it; true, too, where the driver has gone.
  [[nodiscard]] bool is_idle() const noexcept;
  /// Never destroyed: something may still be under way in it.
  void abandon() noexcept { handle_ = nullptr; }

 private:
  int device_;
  StreamHandle handle_ = nullptr;
};

/// What the calling thread has named (CudaStreamScope).
struct NamedStream {
  StreamHandle handle = nullptr;
  int device = -1;
};
/// The device that a stream belongs to; of a default stream the current one. Throws Error(argument) where its context
/// is not the primary one of its device.
int device_of(StreamHandle stream);
/// Names one; returns the one before.
NamedStream name_stream(NamedStream stream) noexcept;
/// The named stream where it is one of this device, else the device's default stream. The device must be current.
struct CallersStream {
  StreamHandle handle = nullptr;
  bool is_captured = false;
};
/// Throws Error(argument) where the default stream cannot be used because another one is being captured into a graph:
/// the capture takes no harm.
CallersStream look_at_callers_stream(int device);
/// The same, with Error(argument) where it is being captured.
StreamHandle callers_stream(int device);

/// Returns when done() does; it is asked in turns with short sleeps. `what` is for messages: "cuda:0 to copy". `on`:
/// ranks without which it cannot come (of a collective between devices). Throws what done() throws; Error(timeout |
/// peer_lost | cancelled), which poison the group.
void wait_for_device(SyncGroup& group, const std::function<bool()>& done, const std::string& what,
                     const WaitOptions& options, std::span<const int> on = {});

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
  CopyQueue& operator=(CopyQueue&&) = delete;

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
