// SPDX-License-Identifier: Apache-2.0
#pragma once
// The part of the CUDA driver interface that Muster uses. It is declared here, so that the library can be built without
// the CUDA toolkit. The driver (libcuda.so.1) is loaded when it is needed. Its binary interface is stable: a function
// that changes gets another name (the _v2 below). If cuda.h is available, tests/device/cuda_declarations.cpp compares
// these declarations with it.

#include <cstddef>
#include <cstdint>
#include <utility>

struct CUctx_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphExec_st;
struct CUstream_st;

namespace muster::cuda {

using Context = ::CUctx_st*;
using EventHandle = ::CUevent_st*;
using StreamHandle = ::CUstream_st*;
using DevicePointer = unsigned long long;

/// CUresult: the values that Muster handles specially.
enum class Status : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  not_initialized = 3,
  no_device = 100,
  invalid_device = 101,
  invalid_context = 201,
  already_mapped = 208,
  not_ready = 600,
  already_registered = 712,
  not_registered = 713,
  stream_capture_unsupported = 900,
  stream_capture_implicit = 906,
  captured_event = 907,
};

// Values of CUpointer_attribute:
inline constexpr int pointer_memory_type = 2;
inline constexpr int pointer_buffer_id = 7;
inline constexpr int pointer_is_managed = 8;
inline constexpr int pointer_device_ordinal = 9;
inline constexpr int pointer_is_exportable = 10;  // by cuIpcGetMemHandle
// Values of CUdevice_attribute:
inline constexpr int device_max_pitch = 11;
// Values of CUmemorytype:
inline constexpr unsigned memory_host = 1;
inline constexpr unsigned memory_device = 2;
// Flags of calls:
inline constexpr unsigned stream_non_blocking = 1;
inline constexpr unsigned event_disable_timing = 2;
inline constexpr unsigned host_register_portable = 1;
inline constexpr unsigned host_alloc_portable = 1;
inline constexpr unsigned ipc_lazy_peer_access = 1;
// Values of CUstreamCaptureMode and CUstreamCaptureStatus:
inline constexpr int capture_mode_relaxed = 2;
inline constexpr int capture_none = 0;
/// Returns the default stream, which synchronises with all streams that were not made non-blocking.
inline StreamHandle legacy_stream() noexcept {
  return reinterpret_cast<StreamHandle>(std::uintptr_t{1});  // NOLINT(performance-no-int-to-ptr): CU_STREAM_LEGACY
}

struct Uuid {
  unsigned char bytes[16];
};

struct IpcHandle {
  unsigned char reserved[64];
};

/// CUDA_MEMCPY2D.
struct Copy2d {
  std::size_t source_x;
  std::size_t source_y;
  unsigned source_type;
  const void* source_host;
  DevicePointer source_device;
  void* source_array;
  std::size_t source_pitch;
  std::size_t target_x;
  std::size_t target_y;
  unsigned target_type;
  void* target_host;
  DevicePointer target_device;
  void* target_array;
  std::size_t target_pitch;
  std::size_t width;
  std::size_t height;
};

/// The functions of a library that is loaded when it is needed. Usable during exit, because it has no destructor.
struct FunctionTable {
  struct ApiEntry {
    ApiEntry(FunctionTable& table, const char* exported) noexcept
        : name(exported), next(std::exchange(table.last, this)) {}
    ApiEntry& operator=(ApiEntry&&) = delete;
    const char* name;  // the name that the library exports
    ApiEntry* next;
    void* address = nullptr;
  };
  ApiEntry* last = nullptr;
};
template <class Signature>
struct Function;
template <class Result, class... Arguments>
struct Function<Result(Arguments...)> : FunctionTable::ApiEntry {
  using Pointer = Result (*)(Arguments...);
  using ApiEntry::ApiEntry;
  Result operator()(Arguments... arguments) const { return reinterpret_cast<Pointer>(address)(arguments...); }
};

/// The driver's functions, named without their prefix "cu".
struct DriverFunctions : FunctionTable {
  Function<Status(unsigned)> init{*this, "cuInit"};
  Function<Status(int*)> driver_version{*this, "cuDriverGetVersion"};
  Function<Status(Status, const char**)> error_name{*this, "cuGetErrorName"};
  Function<Status(Status, const char**)> error_string{*this, "cuGetErrorString"};
  Function<Status(int*)> device_count{*this, "cuDeviceGetCount"};
  Function<Status(int*, int)> device_get{*this, "cuDeviceGet"};
  Function<Status(char*, int, int)> device_name{*this, "cuDeviceGetName"};
  Function<Status(Uuid*, int)> device_uuid{*this, "cuDeviceGetUuid"};
  Function<Status(std::size_t*, int)> device_total_memory{*this, "cuDeviceTotalMem_v2"};
  Function<Status(int*, int, int)> device_attribute{*this, "cuDeviceGetAttribute"};
  Function<Status(Context*, int)> primary_context{*this, "cuDevicePrimaryCtxRetain"};
  Function<Status(Context)> push_context{*this, "cuCtxPushCurrent_v2"};
  Function<Status(Context*)> pop_context{*this, "cuCtxPopCurrent_v2"};
  Function<Status(Context*)> current_context{*this, "cuCtxGetCurrent"};
  Function<Status(int*)> current_device{*this, "cuCtxGetDevice"};
  Function<Status(void*, int, DevicePointer)> pointer_attribute{*this, "cuPointerGetAttribute"};
  Function<Status(DevicePointer*, std::size_t*, DevicePointer)> address_range{*this, "cuMemGetAddressRange_v2"};
  Function<Status(std::size_t*, std::size_t*)> memory_info{*this, "cuMemGetInfo_v2"};
  Function<Status(DevicePointer*, std::size_t)> allocate{*this, "cuMemAlloc_v2"};
  Function<Status(DevicePointer)> free{*this, "cuMemFree_v2"};
  Function<Status(void**, std::size_t, unsigned)> host_allocate{*this, "cuMemHostAlloc"};
  Function<Status(void*)> host_free{*this, "cuMemFreeHost"};
  Function<Status(void*, std::size_t, unsigned)> host_register{*this, "cuMemHostRegister_v2"};
  Function<Status(void*)> host_unregister{*this, "cuMemHostUnregister"};
  Function<Status(void*, DevicePointer, std::size_t, StreamHandle)> copy_to_host{*this, "cuMemcpyDtoHAsync_v2"};
  Function<Status(DevicePointer, const void*, std::size_t, StreamHandle)> copy_to_device{*this, "cuMemcpyHtoDAsync_v2"};
  Function<Status(DevicePointer, DevicePointer, std::size_t, StreamHandle)> copy_on_device{*this,
                                                                                           "cuMemcpyDtoDAsync_v2"};
  Function<Status(const Copy2d*, StreamHandle)> copy_2d{*this, "cuMemcpy2DAsync_v2"};
  Function<Status(StreamHandle*, unsigned)> stream_create{*this, "cuStreamCreate"};
  Function<Status(StreamHandle)> stream_destroy{*this, "cuStreamDestroy_v2"};
  Function<Status(StreamHandle, Context*)> stream_context{*this, "cuStreamGetCtx"};
  Function<Status(StreamHandle)> stream_query{*this, "cuStreamQuery"};
  Function<Status(StreamHandle, EventHandle, unsigned)> stream_wait_event{*this, "cuStreamWaitEvent"};
  Function<Status(StreamHandle, int*)> stream_is_capturing{*this, "cuStreamIsCapturing"};
  Function<Status(int*)> exchange_capture_mode{*this, "cuThreadExchangeStreamCaptureMode"};
  Function<Status(EventHandle*, unsigned)> event_create{*this, "cuEventCreate"};
  Function<Status(EventHandle)> event_destroy{*this, "cuEventDestroy_v2"};
  Function<Status(EventHandle, StreamHandle)> event_record{*this, "cuEventRecord"};
  Function<Status(EventHandle)> event_query{*this, "cuEventQuery"};
  Function<Status(IpcHandle*, DevicePointer)> ipc_export{*this, "cuIpcGetMemHandle"};
  Function<Status(DevicePointer*, IpcHandle, unsigned)> ipc_open{*this, "cuIpcOpenMemHandle_v2"};
  Function<Status(DevicePointer)> ipc_close{*this, "cuIpcCloseMemHandle"};
};

// The functions for graphs. A driver that is too old for them supports everything else.

using GraphHandle = ::CUgraph_st*;
using GraphExecHandle = ::CUgraphExec_st*;

/// A value of CUstreamCaptureMode: calls of other threads do not disturb the capture. NCCL has its own threads.
inline constexpr int capture_mode_thread_local = 1;

struct GraphFunctions : FunctionTable {
  Function<Status(StreamHandle, int)> begin_capture{*this, "cuStreamBeginCapture_v2"};
  Function<Status(StreamHandle, GraphHandle*)> end_capture{*this, "cuStreamEndCapture"};
  Function<Status(GraphExecHandle*, GraphHandle, unsigned long long)> instantiate{*this, "cuGraphInstantiateWithFlags"};
  Function<Status(GraphExecHandle, StreamHandle)> launch{*this, "cuGraphLaunch"};
  Function<Status(GraphHandle)> destroy{*this, "cuGraphDestroy"};
  Function<Status(GraphExecHandle)> destroy_exec{*this, "cuGraphExecDestroy"};
};

}  // namespace muster::cuda
