// SPDX-License-Identifier: Apache-2.0
#pragma once
// Owners of streams and events, and how a rank waits for its own device: the CPU asks, with the group's deadline, and
// hears of the group's failures meanwhile. What is destroyed when the driver has gone already, or in a forked child, is
// only forgotten.

#include <functional>
#include <span>
#include <string>
#include <utility>

#include "muster/sync_group.hpp"

#include "src/device/driver.hpp"

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
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
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
/// Throws Error(argument) where it is being captured into a graph, or the default stream cannot be used because another
/// one is: the capture takes no harm.
StreamHandle callers_stream(int device);

/// Returns when done() does; it is asked in turns with short sleeps. `what` is for messages: "cuda:0 to copy". `on`:
/// ranks without which it cannot come (of a collective between devices). Throws what done() throws; Error(timeout |
/// peer_lost | cancelled), which poison the group.
void wait_for_device(SyncGroup& group, const std::function<bool()>& done, const std::string& what,
                     const WaitOptions& options, std::span<const int> on = {});

}  // namespace muster::cuda
