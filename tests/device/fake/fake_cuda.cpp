// SPDX-License-Identifier: Apache-2.0
// The fake driver's devices, contexts, streams and events, and its functions for tests.

#include "tests/device/fake/fake_cuda.hpp"

#include <cstdio>
#include <cstdlib>

#include "tests/device/fake/fake_machine.hpp"

using namespace fake;

extern "C" {

Status cuInit(unsigned) {
  LOCKED;
  State& s = state();
  if (s.pid == 0) s.pid = ::getpid();
  if (const Status entered = enter("cuInit"); entered != Status::success) return entered;
  if (devices() == 0) return Status::no_device;
  while (s.contexts.size() < static_cast<std::size_t>(devices())) {
    s.contexts.push_back(std::make_unique<CUctx_st>(CUctx_st{static_cast<int>(s.contexts.size())}));
    s.defaults.push_back(std::make_unique<CUstream_st>());
    s.defaults.back()->device = static_cast<int>(s.defaults.size()) - 1;
  }
  return Status::success;
}

Status cuDriverGetVersion(int* version) {
  ENTER("cuDriverGetVersion");
  *version = 12090;
  return Status::success;
}

Status cuGetErrorName(Status status, const char** name) {
  static thread_local std::string text;
  text = status == Status::out_of_memory ? "CUDA_ERROR_OUT_OF_MEMORY"
         : status == Status::no_device   ? "CUDA_ERROR_NO_DEVICE"
                                         : "CUDA_ERROR_" + std::to_string(static_cast<int>(status));
  *name = text.c_str();
  return Status::success;
}

Status cuGetErrorString(Status, const char** words) {
  *words = "said by the fake driver";
  return Status::success;
}

Status cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = devices();
  return Status::success;
}

Status cuDeviceGet(int* handle, int device) {
  ENTER("cuDeviceGet");
  if (device < 0 || device >= devices()) return Status::invalid_device;
  *handle = device;
  return Status::success;
}

Status cuDeviceGetName(char* name, int length, int handle) {
  ENTER("cuDeviceGetName");
  std::snprintf(name, static_cast<std::size_t>(length), "fake device %d", handle);
  return Status::success;
}

Status cuDeviceGetUuid(Uuid* uuid, int handle) {
  ENTER("cuDeviceGetUuid");
  std::memset(uuid, 0, sizeof *uuid);
  const char* name = std::getenv("FAKE_CUDA_HOST");
  std::strncpy(reinterpret_cast<char*>(uuid->bytes), name == nullptr ? "fake" : name, 12);
  uuid->bytes[15] = setting("FAKE_CUDA_ONE_DEVICE", 0) != 0 ? 0 : static_cast<unsigned char>(handle);
  return Status::success;
}

Status cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  ENTER("cuDeviceTotalMem_v2");
  *bytes = setting("FAKE_CUDA_MEMORY", std::uint64_t{4} << 30);
  return Status::success;
}

Status cuDeviceGetAttribute(int* value, int attribute, int) {
  ENTER("cuDeviceGetAttribute");
  if (attribute != muster::cuda::device_max_pitch) return Status::invalid_value;
  *value = static_cast<int>(setting("FAKE_CUDA_MAX_PITCH", max_pitch));
  return Status::success;
}

Status cuDevicePrimaryCtxRetain(CUctx_st** context, int handle) {
  ENTER("cuDevicePrimaryCtxRetain");
  *context = state().contexts[static_cast<std::size_t>(handle)].get();
  return Status::success;
}

Status cuCtxPushCurrent_v2(CUctx_st* context) {
  ENTER("cuCtxPushCurrent_v2");
  current().push_back(context);
  return Status::success;
}

Status cuCtxPopCurrent_v2(CUctx_st** context) {
  ENTER("cuCtxPopCurrent_v2", in_context);
  *context = current().back();
  current().pop_back();
  return Status::success;
}

Status cuCtxGetCurrent(CUctx_st** context) {
  ENTER("cuCtxGetCurrent");
  *context = current().empty() ? nullptr : current().back();
  return Status::success;
}

Status cuCtxGetDevice(int* handle) {
  ENTER("cuCtxGetDevice", in_context);
  *handle = current().back()->device;
  return Status::success;
}

Status cuStreamCreate(CUstream_st** stream, unsigned flags) {
  ENTER("cuStreamCreate", in_context);
  state().streams.push_back(std::make_unique<CUstream_st>());
  *stream = state().streams.back().get();
  (*stream)->context = current().back();
  (*stream)->device = current().back()->device;
  (*stream)->is_blocking = (flags & muster::cuda::stream_non_blocking) == 0;
  return Status::success;
}

Status cuStreamDestroy_v2(CUstream_st* stream) {
  ENTER("cuStreamDestroy_v2", in_context);
  // Its pending work continues: the stream is kept, and only counted as destroyed.
  if (stream->is_gone) return invalid_handle;
  stream->is_gone = true;
  ++state().calls["streams gone"];
  return Status::success;
}

Status cuStreamGetCtx(CUstream_st* stream, CUctx_st** context) {
  ENTER("cuStreamGetCtx");
  if (stream->is_gone) return invalid_handle;
  *context = stream->context;
  return Status::success;
}

Status cuStreamQuery(CUstream_st* stream) {
  ENTER("cuStreamQuery", unsafe);
  if (stream->is_gone) return invalid_handle;
  tick();
  return stream->steps.empty() ? Status::success : Status::not_ready;
}

Status cuStreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned) {
  ENTER("cuStreamWaitEvent", in_context);
  CUstream_st* const real = stream_of(stream);
  if (const Status usable = use(real); usable != Status::success) return usable;
  // A stream that waits for a captured one becomes part of the graph.
  if (event->is_captured) real->is_capturing = true;
  put(real, [marks = event->marks] { return have_passed(marks); });
  return Status::success;
}

Status cuStreamIsCapturing(CUstream_st* stream, int* status) {
  ENTER("cuStreamIsCapturing", in_context);
  CUstream_st* const real = stream_of(stream);
  const bool was_broken = state().is_capture_broken;
  const Status usable = use(real);
  state().is_capture_broken = was_broken;  // this query has no side effect
  if (usable != Status::success) return usable;
  *status = real->is_capturing ? 1 : 0;
  return Status::success;
}

Status cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER("cuThreadExchangeStreamCaptureMode");
  std::swap(*mode, capture_mode());
  return Status::success;
}

Status cuEventCreate(CUevent_st** event, unsigned) {
  ENTER("cuEventCreate", in_context);
  state().events.push_back(std::make_unique<CUevent_st>());
  *event = state().events.back().get();
  (*event)->device = current().back()->device;
  return Status::success;
}

Status cuEventDestroy_v2(CUevent_st* event) {
  ENTER("cuEventDestroy_v2", in_context);
  std::erase_if(state().events, [&](const auto& each) { return each.get() == event; });
  return Status::success;
}

Status cuEventRecord(CUevent_st* event, CUstream_st* stream) {
  ENTER("cuEventRecord", in_context);
  CUstream_st* const real = stream_of(stream);
  if (real->device != event->device) return invalid_handle;
  if (const Status usable = use(real); usable != Status::success) return usable;
  event->is_captured = real->is_capturing;
  event->marks = marks_of(real);
  return Status::success;
}

Status cuEventQuery(CUevent_st* event) {
  ENTER("cuEventQuery", {.is_unsafe = true});
  if (event->is_captured) {
    state().is_capture_broken = true;
    return Status::captured_event;
  }
  tick();
  return have_passed(event->marks) ? Status::success : Status::not_ready;
}

std::uint64_t fake_cuda_calls(const char* name) {
  LOCKED;
  const auto found = state().calls.find(name);
  return found == state().calls.end() ? 0 : found->second;
}

std::uint64_t fake_cuda_pageable_copies() {
  LOCKED;
  return state().pageable_copies;
}

std::uint64_t fake_cuda_open(const char* what) {
  LOCKED;
  State& s = state();
  const std::string name = what;
  if (name == "locks") return s.locked.size();
  if (name == "host") return s.host_allocated.size();
  if (name == "events") return s.events.size();
  if (name == "graphs") return s.graphs.size();
  if (name == "streams") return s.streams.size() - s.calls["streams gone"];
  std::uint64_t count = 0;
  for (const auto& [base, memory] : s.memory)
    if (memory.is_opened == (name == "opened")) ++count;
  return count;
}

int fake_cuda_allocate_from_pool(unsigned long long* pointer, std::uint64_t bytes) {
  LOCKED;
  return static_cast<int>(current().empty() ? Status::invalid_context : allocate(pointer, bytes, false));
}

int fake_cuda_allocate_managed(unsigned long long* pointer, std::uint64_t bytes) {
  LOCKED;
  const Status status = current().empty() ? Status::invalid_context : allocate(pointer, bytes, false);
  if (status == Status::success) find(*pointer)->is_managed = true;
  return static_cast<int>(status);
}

void* fake_cuda_context(int device) {
  LOCKED;
  state().contexts.push_back(std::make_unique<CUctx_st>(CUctx_st{device}));
  return state().contexts.back().get();
}

void fake_cuda_capture(void* stream, bool begins) {
  LOCKED;
  static_cast<CUstream_st*>(stream)->is_capturing = begins;
  static_cast<CUstream_st*>(stream)->captured.clear();
}

bool fake_cuda_capture_is_whole() {
  LOCKED;
  return !state().is_capture_broken;
}

void fake_cuda_break(int status) {
  LOCKED;
  state().broken = static_cast<Status>(status);
}

void fake_cuda_enqueue(void* stream, std::function<bool()>* step) {
  LOCKED;
  put(static_cast<CUstream_st*>(stream), *step);
}

void* fake_cuda_stream(void* stream) {
  LOCKED;
  return current().empty() ? nullptr : stream_of(static_cast<CUstream_st*>(stream));
}

void* fake_cuda_memory(const void* pointer) {
  LOCKED;
  return real_of(reinterpret_cast<std::uintptr_t>(pointer), 0);
}

void fake_cuda_tick() {
  LOCKED;
  tick();
}

int fake_cuda_current_uuid(unsigned char* uuid) {
  int device = 0;
  {
    LOCKED;
    if (current().empty()) return -1;
    device = current().back()->device;
  }
  Uuid found{};
  if (cuDeviceGetUuid(&found, device) != Status::success) return -1;
  std::memcpy(uuid, found.bytes, sizeof found.bytes);
  return 0;
}

}  // extern "C"
