// SPDX-License-Identifier: Apache-2.0
#include "src/device/stream.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "muster/error.hpp"
#include "src/sync/failing.hpp"
#include "src/sync/settings.hpp"

namespace muster::cuda {
namespace {

thread_local NamedStream named;

/// 0, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are streams of whatever device is current.
bool is_default(StreamHandle stream) noexcept {
  return reinterpret_cast<std::uintptr_t>(stream) <= 2;
}

}  // namespace

Event::Event(int device) : device_(device) {
  const Current current(device);
  check(driver().event_create(&handle_, event_disable_timing), fmt::format("making an event on cuda:{}", device));
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

Stream::Stream(int device) : device_(device) {
  const Current current(device);
  check(driver().stream_create(&handle_, stream_non_blocking), fmt::format("making a stream on cuda:{}", device));
}

Stream::~Stream() {
  if (handle_ == nullptr) return;
  on_device_if_there(device_, [&](const DriverFunctions& functions) { functions.stream_destroy(handle_); });
}

void Stream::wait_for(const Event& event) {
  const Current current(device_);
  check(driver().stream_wait_event(handle_, event.handle(), 0),
        fmt::format("queueing behind the caller's work on cuda:{}", device_));
}

bool Stream::is_idle() const noexcept {
  if (handle_ == nullptr) return true;
  // Where the device has failed or gone, nothing goes on in it either.
  Status status = Status::success;
  on_device_if_there(device_, [&](const DriverFunctions& functions) { status = functions.stream_query(handle_); });
  return status != Status::not_ready;
}

StreamHandle callers_stream(int device) {
  const StreamHandle stream = named.handle == nullptr || named.device != device ? legacy_stream() : named.handle;
  // An event of a stream that is captured would draw our streams into the graph, and nothing would be copied.
  int capture = capture_none;
  const Status status = driver().stream_is_capturing(stream, &capture);
  if (status == Status::stream_capture_implicit)
    throw Error(
        ErrorKind::argument,
        fmt::format("a stream of cuda:{} is being captured into a graph, and the default stream cannot be waited "
                    "for meanwhile: name the stream that the tensors come from (CudaStreamScope), or end the "
                    "capture first",
                    device));
  check(status, fmt::format("asking a stream of cuda:{} whether it is captured", device));
  if (capture != capture_none)
    throw Error(
        ErrorKind::argument,
        fmt::format("the stream of cuda:{} that is named is being captured into a graph, and an exchange is not "
                    "a part of one: end the capture first",
                    device));
  return stream;
}

int device_of(StreamHandle stream) {
  if (is_default(stream)) return current_device().value_or(0);
  Context context = nullptr;
  check(driver().stream_context(stream, &context), "asking a stream for its context");
  const Current current(context);
  const std::optional<int> device = current_device();
  if (!device || primary_context(*device) != context)
    throw Error(ErrorKind::argument,
                "the stream that is named belongs to a context that the program has made itself (cuCtxCreate): name "
                "one of the device's primary context, which is that of the CUDA runtime");
  return *device;
}

NamedStream name_stream(NamedStream stream) noexcept {
  return std::exchange(named, stream);
}

void wait_for_device(SyncGroup& group, const std::function<bool()>& done, const std::string& what,
                     const WaitOptions& options, std::span<const int> on) {
  using Clock = std::chrono::steady_clock;
  using namespace std::chrono_literals;
  const Clock::time_point begin = Clock::now();
  const auto timeout = sync::timeout_of(options.timeout, group.timeout());
  // The group's own deadline is about other ranks; a device that hangs has none.
  const auto is_done = [&] {
    if (done()) return true;
    if (Clock::now() - begin < timeout) return false;
    const RankInfo& self = group.info(group.rank());
    sync::fail(group, sync::error_of(self, ErrorKind::timeout,
                                     fmt::format("{} waited {:.1f} s in '{}' for {}: look what else runs there, or "
                                                 "raise the timeout (MUSTER_TIMEOUT, seconds)",
                                                 sync::name_of(self), std::chrono::duration<double>(timeout).count(),
                                                 options.phase, what)));
  };
  auto pause = 2us;
  group.wait_until(
      is_done,
      [&](std::chrono::nanoseconds longest) {
        // A copy of some MiB takes about a millisecond: short at first, so that small tensors do not wait.
        std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(longest, pause));
        pause = std::min<std::chrono::microseconds>(2 * pause, 200us);
      },
      on, options);
}

}  // namespace muster::cuda
