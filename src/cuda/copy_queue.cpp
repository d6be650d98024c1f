// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/copy_queue.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "muster/error.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/clock.hpp"

namespace muster::cuda {
namespace {

constexpr std::uint64_t bounce_bytes = 8 << 20;

thread_local NamedStream named;

/// The handles 0, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD mean streams of the current device.
bool is_default(StreamHandle stream) noexcept {
  return reinterpret_cast<std::uintptr_t>(stream) <= 2;
}

/// Describes a copy of rows [begin, end) of a tensor to contiguous memory.
Copy2d rows_to_host(const TensorView& source, const Pitched& layout, std::uint64_t begin, std::uint64_t end,
                    std::byte* target) {
  Copy2d copy{};
  copy.source_type = memory_device;
  copy.source_device = device_pointer(source.data()) + begin * layout.pitch;
  copy.source_pitch = layout.pitch;
  copy.target_type = memory_host;
  copy.target_host = target;
  copy.target_pitch = layout.width;
  copy.width = layout.width;
  copy.height = end - begin;
  return copy;
}

/// Calls `use(offset, bytes, copy)` for pieces of at most `most` bytes of the target. `copy(to)` queues the copy of one
/// piece.
void each_piece(const TensorView& source, std::uint64_t most, StreamHandle stream, const auto& use) {
  const Pitched layout = require_pitched(source);
  const DriverFunctions& functions = driver();
  const std::string attempted = fmt::format("copying from {} to the host", to_string(source.device()));
  if (layout.rows == 1) {
    for (std::uint64_t at = 0; at < layout.width; at += most) {
      const std::uint64_t bytes = std::min(most, layout.width - at);
      use(at, bytes, [&](std::byte* to) {
        check(functions.copy_to_host(to, device_pointer(source.data()) + at, bytes, stream), attempted);
      });
    }
    return;
  }
  // The driver rejects a larger pitch.
  if (layout.width > most || layout.pitch > device_max_pitch_bytes(source.device().index)) {
    for (std::uint64_t row = 0; row < layout.rows; ++row)
      for (std::uint64_t at = 0; at < layout.width; at += most) {
        const std::uint64_t bytes = std::min(most, layout.width - at);
        use(row * layout.width + at, bytes, [&](std::byte* to) {
          check(functions.copy_to_host(to, device_pointer(source.data()) + row * layout.pitch + at, bytes, stream),
                attempted);
        });
      }
    return;
  }
  const std::uint64_t at_once = most / layout.width;
  for (std::uint64_t row = 0; row < layout.rows; row += at_once) {
    const std::uint64_t end = std::min(layout.rows, row + at_once);
    use(row * layout.width, (end - row) * layout.width, [&](std::byte* to) {
      const Copy2d copy = rows_to_host(source, layout, row, end, to);
      check(functions.copy_2d(&copy, stream), attempted);
    });
  }
}

}  // namespace

Event::Event(int device) : device_(device) {
  const Current current(device);
  check(driver().event_create(&handle_, event_disable_timing), fmt::format("creating an event on cuda:{}", device));
}

Event::~Event() {
  if (handle_ == nullptr) return;
  on_device_if_there(device_, [&](const DriverFunctions& functions) { functions.event_destroy(handle_); });
}

void Event::record(StreamHandle stream) {
  check(driver().event_record(handle_, stream), fmt::format("recording an event on cuda:{}", device_));
}

bool Event::has_passed() const {
  const BesideCaptures beside;
  const Status status = driver().event_query(handle_);
  if (status == Status::not_ready) return false;
  check(status, fmt::format("waiting for cuda:{}", device_));
  return true;
}

CopyStream::CopyStream(int device) : device_(device) {
  const Current current(device);
  check(driver().stream_create(&handle_, stream_non_blocking), fmt::format("creating a stream on cuda:{}", device));
}

CopyStream::~CopyStream() {
  if (handle_ == nullptr) return;
  on_device_if_there(device_, [&](const DriverFunctions& functions) { functions.stream_destroy(handle_); });
}

void CopyStream::wait_for(const Event& event) {
  const Current current(device_);
  check(driver().stream_wait_event(handle_, event.handle(), 0),
        fmt::format("queueing behind the caller's work on cuda:{}", device_));
}

bool CopyStream::is_idle() const noexcept {
  if (handle_ == nullptr) return true;
  // If the device has failed or the driver has been unloaded, the stream is idle too.
  Status status = Status::success;
  on_device_if_there(device_, [&](const DriverFunctions& functions) { status = functions.stream_query(handle_); });
  return status != Status::not_ready;
}

CallersStream look_at_callers_stream(int device) {
  const StreamHandle stream = named.handle == nullptr || named.device != device ? legacy_stream() : named.handle;
  int capture = capture_none;
  const Status status = driver().stream_is_capturing(stream, &capture);
  if (status == Status::stream_capture_implicit)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("a stream of cuda:{} is being captured into a graph, so Muster cannot wait for the default "
                            "stream. Name the stream of the tensors (CudaStreamScope), or end the capture first",
                            device));
  check(status, fmt::format("reading the capture status of a stream of cuda:{}", device));
  return {stream, capture != capture_none};
}

StreamHandle callers_stream(int device) {
  const CallersStream stream = look_at_callers_stream(device);
  // An event of a stream that is being captured would make our streams part of the graph, and nothing would be copied.
  if (stream.is_captured)
    throw Error(ErrorKind::invalid_argument, fmt::format("the named stream of cuda:{} is being captured into a graph, "
                                                         "which cannot contain an exchange. End the capture first",
                                                         device));
  return stream.handle;
}

int device_of(StreamHandle stream) {
  if (is_default(stream)) return current_device().value_or(0);
  Context context = nullptr;
  check(driver().stream_context(stream, &context), "reading the context of a stream");
  const Current current(context);
  const std::optional<int> device = current_device();
  if (!device || primary_context(*device) != context)
    throw Error(ErrorKind::invalid_argument,
                "the named stream belongs to a context that the program created itself (cuCtxCreate). Use a stream of "
                "the device's primary context, which is that of the CUDA runtime");
  return *device;
}

NamedStream name_stream(NamedStream stream) noexcept {
  return std::exchange(named, stream);
}

void wait_for_device(Group& group, const std::function<bool()>& done, const std::string& what,
                     const WaitOptions& options, std::span<const int> on) {
  using Clock = os::Clock;
  using namespace std::chrono_literals;
  const Clock::time_point begin = Clock::now();
  const auto timeout = group::timeout_of(options, group);
  // The deadline of the group concerns other ranks. A device that hangs needs this one.
  const auto is_done = [&] {
    if (done()) return true;
    if (Clock::now() - begin < timeout) return false;
    const RankInfo& self = group.info(group.rank());
    group::fail(group, group::error_of(self, ErrorKind::timeout,
                                       fmt::format("timeout: {} waited {:.1f} s in {} for {}. Inspect what else uses "
                                                   "that device, or raise MUSTER_TIMEOUT (seconds)",
                                                   group::name_of(self), std::chrono::duration<double>(timeout).count(),
                                                   options.phase, what)));
  };
  group.wait_until(
      is_done,
      [&](std::chrono::nanoseconds longest) {
        // A GPU copies 32 MiB of its own memory in 25 microseconds, and no sleep is shorter than 50. Longer waits may
        // end late by an eighth.
        const std::chrono::nanoseconds waited = Clock::now() - begin;
        if (waited < 50us) return std::this_thread::yield();
        std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>({longest, waited / 8, 200us}));
      },
      on, options);
}

CopyQueue::~CopyQueue() {
  // On a working device, a failed copy ends soon. Its memory then need not be kept.
  const auto until = os::Clock::now() + std::chrono::seconds(1);
  while (!stream_.is_idle() && os::Clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (stream_.is_idle()) return;
  stream_.abandon();
  hold_for_ever(std::move(kept_));
}

void CopyQueue::hold_for_ever(std::unique_ptr<Kept> kept) noexcept {
  // A device may still write to this memory, so it is never destroyed. It is in a list, so that leak checkers find it.
  static std::atomic<Kept*> latest{nullptr};
  Kept* const held = kept.release();
  held->next = latest.exchange(held);
}

void CopyQueue::follow_caller(int device) {
  const Current current(device);
  Event event(device);
  event.record(callers_stream(device));
  stream_.wait_for(event);
}

void CopyQueue::to_host(const TensorView& source, std::byte* target) {
  if (source.nbytes() == 0) return;
  const Current current(device());
  each_piece(source, piece_bytes, stream(), [&](std::uint64_t offset, std::uint64_t bytes, const auto& copy) {
    copy(target + offset);
    copied(bytes);
  });
}

void CopyQueue::to_device(const std::byte* source, DevicePointer target, std::uint64_t bytes) {
  const Current current(device());
  for (std::uint64_t at = 0; at < bytes; at += piece_bytes) {
    const std::uint64_t piece = std::min(piece_bytes, bytes - at);
    check(driver().copy_to_device(target + at, source + at, piece, stream()),
          fmt::format("copying from the host to cuda:{}", device()));
    copied(piece);
  }
}

void CopyQueue::on_device(DevicePointer source, DevicePointer target, std::uint64_t bytes) {
  const Current current(device());
  for (std::uint64_t at = 0; at < bytes; at += device_piece_bytes) {
    const std::uint64_t piece = std::min(device_piece_bytes, bytes - at);
    check(driver().copy_on_device(target + at, source + at, piece, stream()),
          fmt::format("copying from another device to cuda:{}", device()));
    copied(piece, device_piece_bytes);
  }
}

void CopyQueue::copied(std::uint64_t bytes, std::uint64_t most) {
  has_unmarked_ = true;
  unmarked_ += bytes;
  if (unmarked_ >= most) mark();
}

void CopyQueue::mark() {
  const Current current(device());
  if (spare_.empty()) spare_.emplace_back(device());
  spare_.back().record(stream());
  marks_.push_back(std::move(spare_.back()));
  spare_.pop_back();
  unmarked_ = 0;
  has_unmarked_ = false;
}

void CopyQueue::wait_for_first(Group& group, const WaitOptions& options, const OthersInStream& others) {
  const auto has_passed = [&] {
    if (marks_.front().has_passed()) return true;
    others.look();
    return false;
  };
  wait_for_device(group, has_passed, fmt::format("cuda:{} to copy", device()), options, others.ranks);
  spare_.push_back(std::move(marks_.front()));
  marks_.pop_front();
  group.progress();
}

void CopyQueue::finish(Group& group, const WaitOptions& options, const OthersInStream& others) {
  if (has_unmarked_) mark();
  while (!marks_.empty()) wait_for_first(group, options, others);
  kept_->memory.clear();
}

void CopyQueue::bounce_to_host(const TensorView& source, std::byte* target, MemoryPool& pinned, Group& group,
                               const WaitOptions& options) {
  if (source.nbytes() == 0) return;
  finish(group, options);
  const Current current(device());
  const std::uint64_t half_bytes = std::min(bounce_bytes, source.nbytes());
  const MemoryPool::Buffer buffer = pinned.take(2 * half_bytes);
  keep(buffer.data);
  struct Filled {
    std::byte* from;
    std::byte* to;
    std::uint64_t bytes;
  };
  std::deque<Filled> filled;
  const auto empty_one = [&] {
    wait_for_first(group, options);
    std::memcpy(filled.front().to, filled.front().from, filled.front().bytes);
    filled.pop_front();
  };
  std::size_t turn = 0;
  each_piece(source, half_bytes, stream(), [&](std::uint64_t offset, std::uint64_t bytes, const auto& copy) {
    if (filled.size() == 2) empty_one();
    std::byte* const half = buffer.data.get() + (turn++ % 2) * half_bytes;
    copy(half);
    mark();
    filled.push_back({half, target + offset, bytes});
  });
  while (!filled.empty()) empty_one();
  kept_->memory.clear();
}

void CopyQueue::bounce_to_device(const std::byte* source, DevicePointer target, std::uint64_t bytes, MemoryPool& pinned,
                                 Group& group, const WaitOptions& options) {
  if (bytes == 0) return;
  const Current current(device());
  const std::uint64_t half_bytes = std::min(bounce_bytes, bytes);
  const MemoryPool::Buffer buffer = pinned.take(2 * half_bytes);
  keep(buffer.data);
  std::size_t turn = 0;
  for (std::uint64_t at = 0; at < bytes; at += half_bytes) {
    // Wait until the copy from this half two turns ago has completed.
    while (marks_.size() >= 2) wait_for_first(group, options);
    const std::uint64_t piece = std::min(half_bytes, bytes - at);
    std::byte* const half = buffer.data.get() + (turn++ % 2) * half_bytes;
    std::memcpy(half, source + at, piece);
    to_device(half, target + at, piece);
    if (has_unmarked_) mark();
  }
  while (!marks_.empty()) wait_for_first(group, options);
  kept_->memory.pop_back();
}

std::optional<Pitched> pitched(const TensorView& view) {
  const std::uint64_t bytes = view.nbytes();
  if (view.is_contiguous()) return Pitched{bytes, 1, bytes};
  // From the innermost dimension outwards: first contiguous elements, then rows with one pitch.
  const auto item = static_cast<std::int64_t>(itemsize(view.dtype()));
  std::int64_t width = item;
  std::int64_t rows = 1;
  std::int64_t pitch = 0;
  for (std::size_t dim = view.shape().size(); dim-- > 0;) {
    const std::int64_t extent = view.shape()[dim];
    const std::int64_t step = view.strides()[dim] * item;
    if (extent == 1) continue;
    if (rows == 1 && step == width) {
      width *= extent;
    } else if (rows == 1 && step > width) {
      rows = extent;
      pitch = step;
    } else if (rows > 1 && step == pitch * rows) {
      rows *= extent;
    } else {
      return std::nullopt;
    }
  }
  if (rows == 1) pitch = width;
  return Pitched{static_cast<std::uint64_t>(width), static_cast<std::uint64_t>(rows),
                 static_cast<std::uint64_t>(pitch)};
}

Pitched require_pitched(const TensorView& view) {
  if (const auto layout = pitched(view)) return *layout;
  throw Error(
      ErrorKind::invalid_argument,
      fmt::format(
          "a tensor of shape {} on {} has strides that a device cannot copy in one operation. Make it contiguous first",
          to_string(view.shape()), to_string(view.device())));
}

}  // namespace muster::cuda
