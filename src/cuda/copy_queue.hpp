// SPDX-License-Identifier: Apache-2.0
#pragma once
// CopyQueue: copies of one rank from and to one of its devices. The copies are queued in a private stream, in pieces,
// and the CPU waits for them.
//
//  1. follow_caller(): work that the caller queued before the exchange is done first. The device waits for it, not the
//     CPU.
//  2. to_host(), to_device(): each piece of at most `piece_bytes` is followed by an event. on_device(): the same, with
//     `device_piece_bytes`.
//  3. finish(): the CPU queries one event after another. Each event that has passed counts as progress of this rank.
// A device copies rows of bytes with a fixed pitch (Pitched) in one operation. The queues of several devices are filled
// before the first of them is waited for, so their copies run concurrently. The CPU waits for its device with the
// deadline of the group, and receives failures of the group meanwhile. Streams and events that are destroyed after the
// driver was unloaded, or in a forked child, are not released.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "muster/group.hpp"
#include "muster/tensor.hpp"
#include "src/cuda/driver.hpp"
#include "src/cuda/memory_pool.hpp"

namespace muster::cuda {

/// A CUDA event without timing.
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
  /// Records the event after everything that is in `stream` now. The event's device must be current.
  void record(StreamHandle stream);
  /// Returns whether the stream has reached the event. Throws Error(io) if the device has failed.
  [[nodiscard]] bool has_passed() const;
  [[nodiscard]] EventHandle handle() const noexcept { return handle_; }

 private:
  int device_;
  EventHandle handle_ = nullptr;
};

/// A stream that does not synchronise with any other stream, including the default stream.
class CopyStream {
 public:
  explicit CopyStream(int device);
  ~CopyStream();
  CopyStream& operator=(CopyStream&&) = delete;
  [[nodiscard]] StreamHandle handle() const noexcept { return handle_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  /// Makes later work in this stream wait for `event`. The CPU does not wait.
  void wait_for(const Event& event);
  /// Returns whether no work is left in the stream. Also true after the driver was unloaded.
  [[nodiscard]] bool is_idle() const noexcept;
  /// Never destroys the stream, because work may still be in progress in it.
  void abandon() noexcept { handle_ = nullptr; }

 private:
  int device_;
  StreamHandle handle_ = nullptr;
};

/// The stream that the calling thread has named (CudaStreamScope).
struct NamedStream {
  StreamHandle handle = nullptr;
  int device = -1;
};
/// Returns the device to which a stream belongs; for a default stream, the current device. Throws
/// Error(invalid_argument) if the context of the stream is not the primary context of its device.
int device_of(StreamHandle stream);
/// Sets the named stream of this thread and returns the previous one.
NamedStream name_stream(NamedStream stream) noexcept;
/// The named stream if it belongs to the device, otherwise the default stream of the device.
struct CallersStream {
  StreamHandle handle = nullptr;
  bool is_captured = false;
};
/// Returns the stream of the caller. The device must be current. Throws Error(invalid_argument) if the default stream
/// cannot be used because another stream is being captured into a graph. The capture is not affected.
CallersStream look_at_callers_stream(int device);
/// Returns the stream of the caller. Also throws Error(invalid_argument) if it is being captured.
StreamHandle callers_stream(int device);

/// Waits until done() returns true; calls it repeatedly with short sleeps. `what` is for messages: "cuda:0 to copy".
/// `on` contains the other ranks that take part in a collective between devices. Throws the errors of done(), and
/// Error(timeout | peer_lost | cancelled), which fail the group.
void wait_for_device(Group& group, const std::function<bool()>& done, const std::string& what,
                     const WaitOptions& options, std::span<const int> on = {});

/// `rows` rows of `width` bytes. The distance between the beginnings of two rows is `pitch` bytes.
struct Pitched {
  std::uint64_t width = 0;
  std::uint64_t rows = 1;
  std::uint64_t pitch = 0;  ///< at least `width`
  friend bool operator==(const Pitched&, const Pitched&) = default;
};

/// Returns nullopt if the strides cannot be described in this way: there are gaps in more than one dimension, the order
/// is not row-major, or elements overlap. Pure.
std::optional<Pitched> pitched(const TensorView& view);

/// Returns the layout, or throws Error(invalid_argument) with a remedy.
Pitched require_pitched(const TensorView& view);

/// The bytes between two signs of progress. A copy of this size is long compared with the cost of an event, and short
/// compared with any deadline.
inline constexpr std::uint64_t piece_bytes = 32 << 20;
/// The same between devices, which copy 30 to 60 times as fast if they are one device: with pieces of 32 MiB, a copy
/// takes a fifth longer.
inline constexpr std::uint64_t device_piece_bytes = 512 << 20;

/// Other participants of the work in a stream.
struct OthersInStream {
  std::span<const int> ranks = {};     ///< the ranks whose devices take part
  std::function<void()> look = [] {};  ///< throws if the work has failed; called as often as the device is queried
};

class CopyQueue {
 public:
  explicit CopyQueue(int device) : stream_(device), kept_(std::make_unique<Kept>()) {}
  /// If work is still in progress, its memory and the stream are kept until the process ends.
  ~CopyQueue();
  CopyQueue& operator=(CopyQueue&&) = delete;

  [[nodiscard]] int device() const noexcept { return stream_.device(); }
  [[nodiscard]] StreamHandle stream() const noexcept { return stream_.handle(); }

  void follow_caller() { follow_caller(device()); }
  /// Waits for the work that the caller has queued on another device of this process.
  void follow_caller(int device);
  /// `target` is page-locked and has at least source.nbytes() bytes. Throws Error(invalid_argument) for strides that
  /// cannot be copied.
  void to_host(const TensorView& source, std::byte* target);
  /// `source` is page-locked memory.
  void to_device(const std::byte* source, DevicePointer target, std::uint64_t bytes);
  /// Copies between two devices, or from an allocation opened by IPC.
  void on_device(DevicePointer source, DevicePointer target, std::uint64_t bytes);
  /// Keeps `memory`, which the queued work uses, until that work has completed.
  void keep(std::shared_ptr<const void> memory) { kept_->memory.push_back(std::move(memory)); }
  /// Called after other work was put into the stream.
  void mark();

  /// Waits until all work has completed. Throws Error(io) if the device has failed, and as wait_for_device.
  void finish(Group& group, const WaitOptions& options, const OthersInStream& others = {});

  /// Copies from or to pageable memory. The driver would copy such memory through its own buffers, and block the CPU
  /// meanwhile. These functions use two small page-locked buffers instead: one is filled while the other one is
  /// emptied. They return when the copy is complete.
  void bounce_to_host(const TensorView& source, std::byte* target, MemoryPool& pinned, Group& group,
                      const WaitOptions& options);
  void bounce_to_device(const std::byte* source, DevicePointer target, std::uint64_t bytes, MemoryPool& pinned,
                        Group& group, const WaitOptions& options);

 private:
  void copied(std::uint64_t bytes, std::uint64_t most = piece_bytes);
  void wait_for_first(Group& group, const WaitOptions& options, const OthersInStream& others = {});

  CopyStream stream_;
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
