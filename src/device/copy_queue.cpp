// SPDX-License-Identifier: Apache-2.0
#include "src/device/copy_queue.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

namespace muster::cuda {
namespace {

constexpr std::uint64_t bounce_bytes = 8 << 20;

/// Rows [begin, end) of a tensor, to a place without gaps.
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

/// Calls `use(offset, bytes, copy)` for pieces of at most `most` bytes of the target; `copy(to)` queues one.
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
  // The driver refuses rows that are farther apart.
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

CopyQueue::~CopyQueue() {
  // What has failed ends soon on a device that works: its memory need not be kept then.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (!stream_.is_idle() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (stream_.is_idle()) return;
  stream_.abandon();
  hold_for_ever(std::move(kept_));
}

void CopyQueue::hold_for_ever(std::unique_ptr<Kept> kept) noexcept {
  // A device may still write there. Never destroyed, at exit neither; listed, so that leak checkers find it.
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
  for (std::uint64_t at = 0; at < bytes; at += piece_bytes) {
    const std::uint64_t piece = std::min(piece_bytes, bytes - at);
    check(driver().copy_on_device(target + at, source + at, piece, stream()),
          fmt::format("copying from another device to cuda:{}", device()));
    copied(piece);
  }
}

void CopyQueue::copied(std::uint64_t bytes) {
  has_unmarked_ = true;
  unmarked_ += bytes;
  if (unmarked_ >= piece_bytes) mark();
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

void CopyQueue::wait_for_first(SyncGroup& group, const WaitOptions& options, const OthersInStream& others) {
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

void CopyQueue::finish(SyncGroup& group, const WaitOptions& options, const OthersInStream& others) {
  if (has_unmarked_) mark();
  while (!marks_.empty()) wait_for_first(group, options, others);
  kept_->memory.clear();
}

void CopyQueue::bounce_to_host(const TensorView& source, std::byte* target, MemoryPool& pinned, SyncGroup& group,
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
                                 SyncGroup& group, const WaitOptions& options) {
  if (bytes == 0) return;
  const Current current(device());
  const std::uint64_t half_bytes = std::min(bounce_bytes, bytes);
  const MemoryPool::Buffer buffer = pinned.take(2 * half_bytes);
  keep(buffer.data);
  std::size_t turn = 0;
  for (std::uint64_t at = 0; at < bytes; at += half_bytes) {
    // What was in this half two turns ago has left it.
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
  // From the innermost dimension out: first what lies side by side, then steps of one length.
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
  throw Error(ErrorKind::argument,
              fmt::format("a tensor of shape {} on {} has strides that a device cannot copy in one go: make it "
                          "contiguous there first",
                          to_string(view.shape()), to_string(view.device())));
}

}  // namespace muster::cuda
