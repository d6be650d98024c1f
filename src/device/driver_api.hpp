// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is used of the CUDA driver, declared here: the library is built where no toolkit is, and loads the driver
// (libcuda.so.1) when it is needed. The driver's interface is binary stable: a function that changes gets another name
// (the _v2 below). Where cuda.h is found, tests/device/cuda_declarations.cpp compares these with it.

#include <cstddef>
#include <cstdint>

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

/// CUresult. Those that mean something to us.
enum class Status : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  not_initialized = 3,
  deinitialized = 4,
  no_device = 100,
  invalid_device = 101,
  invalid_context = 201,
  already_mapped = 208,
  peer_access_unsupported = 217,
  not_ready = 600,
  context_is_destroyed = 709,
  already_registered = 712,
  not_registered = 713,
  stream_capture_unsupported = 900,
  stream_capture_implicit = 906,
  captured_event = 907,
};

// CUpointer_attribute.
inline constexpr int pointer_memory_type = 2;
inline constexpr int pointer_buffer_id = 7;
inline constexpr int pointer_is_managed = 8;
inline constexpr int pointer_device_ordinal = 9;
inline constexpr int pointer_is_exportable = 10;  // by cuIpcGetMemHandle
// CUdevice_attribute.
inline constexpr int device_max_pitch = 11;
// CUmemorytype.
inline constexpr unsigned memory_host = 1;
inline constexpr unsigned memory_device = 2;
// Flags.
inline constexpr unsigned stream_non_blocking = 1;
inline constexpr unsigned event_disable_timing = 2;
inline constexpr unsigned host_register_portable = 1;
inline constexpr unsigned host_alloc_portable = 1;
inline constexpr unsigned ipc_lazy_peer_access = 1;
// CUstreamCaptureMode, CUstreamCaptureStatus.
inline constexpr int capture_mode_relaxed = 2;
inline constexpr int capture_none = 0;
/// The default stream, which waits for all streams that were not made non-blocking.
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

/// The driver's functions, by their names without "cu".
struct DriverFunctions {
  Status (*init)(unsigned) = nullptr;
  Status (*driver_version)(int*) = nullptr;
  Status (*error_name)(Status, const char**) = nullptr;
  Status (*error_string)(Status, const char**) = nullptr;
  Status (*device_count)(int*) = nullptr;
  Status (*device_get)(int*, int) = nullptr;
  Status (*device_name)(char*, int, int) = nullptr;
  Status (*device_uuid)(Uuid*, int) = nullptr;
  Status (*device_total_memory)(std::size_t*, int) = nullptr;
  Status (*device_attribute)(int*, int, int) = nullptr;
  Status (*primary_context)(Context*, int) = nullptr;
  Status (*push_context)(Context) = nullptr;
  Status (*pop_context)(Context*) = nullptr;
  Status (*current_context)(Context*) = nullptr;
  Status (*current_device)(int*) = nullptr;
  Status (*pointer_attribute)(void*, int, DevicePointer) = nullptr;
  Status (*address_range)(DevicePointer*, std::size_t*, DevicePointer) = nullptr;
  Status (*memory_info)(std::size_t*, std::size_t*) = nullptr;
  Status (*allocate)(DevicePointer*, std::size_t) = nullptr;
  Status (*free)(DevicePointer) = nullptr;
  Status (*host_allocate)(void**, std::size_t, unsigned) = nullptr;
  Status (*host_free)(void*) = nullptr;
  Status (*host_register)(void*, std::size_t, unsigned) = nullptr;
  Status (*host_unregister)(void*) = nullptr;
  Status (*copy_to_host)(void*, DevicePointer, std::size_t, StreamHandle) = nullptr;
  Status (*copy_to_device)(DevicePointer, const void*, std::size_t, StreamHandle) = nullptr;
  Status (*copy_on_device)(DevicePointer, DevicePointer, std::size_t, StreamHandle) = nullptr;
  Status (*copy_2d)(const Copy2d*, StreamHandle) = nullptr;
  Status (*stream_create)(StreamHandle*, unsigned) = nullptr;
  Status (*stream_destroy)(StreamHandle) = nullptr;
  Status (*stream_context)(StreamHandle, Context*) = nullptr;
  Status (*stream_query)(StreamHandle) = nullptr;
  Status (*stream_wait_event)(StreamHandle, EventHandle, unsigned) = nullptr;
  Status (*stream_is_capturing)(StreamHandle, int*) = nullptr;
  Status (*exchange_capture_mode)(int*) = nullptr;
  Status (*event_create)(EventHandle*, unsigned) = nullptr;
  Status (*event_destroy)(EventHandle) = nullptr;
  Status (*event_record)(EventHandle, StreamHandle) = nullptr;
  Status (*event_query)(EventHandle) = nullptr;
  Status (*ipc_export)(IpcHandle*, DevicePointer) = nullptr;
  Status (*ipc_open)(DevicePointer*, IpcHandle, unsigned) = nullptr;
  Status (*ipc_close)(DevicePointer) = nullptr;
};

/// Calls `use(name, member)` for every function, with the name that the driver exports it under.
template <class Functions, class Use>
void for_each_function(Functions& f, const Use& use) {
  use("cuInit", f.init);
  use("cuDriverGetVersion", f.driver_version);
  use("cuGetErrorName", f.error_name);
  use("cuGetErrorString", f.error_string);
  use("cuDeviceGetCount", f.device_count);
  use("cuDeviceGet", f.device_get);
  use("cuDeviceGetName", f.device_name);
  use("cuDeviceGetUuid", f.device_uuid);
  use("cuDeviceTotalMem_v2", f.device_total_memory);
  use("cuDeviceGetAttribute", f.device_attribute);
  use("cuDevicePrimaryCtxRetain", f.primary_context);
  use("cuCtxPushCurrent_v2", f.push_context);
  use("cuCtxPopCurrent_v2", f.pop_context);
  use("cuCtxGetCurrent", f.current_context);
  use("cuCtxGetDevice", f.current_device);
  use("cuPointerGetAttribute", f.pointer_attribute);
  use("cuMemGetAddressRange_v2", f.address_range);
  use("cuMemGetInfo_v2", f.memory_info);
  use("cuMemAlloc_v2", f.allocate);
  use("cuMemFree_v2", f.free);
  use("cuMemHostAlloc", f.host_allocate);
  use("cuMemFreeHost", f.host_free);
  use("cuMemHostRegister_v2", f.host_register);
  use("cuMemHostUnregister", f.host_unregister);
  use("cuMemcpyDtoHAsync_v2", f.copy_to_host);
  use("cuMemcpyHtoDAsync_v2", f.copy_to_device);
  use("cuMemcpyDtoDAsync_v2", f.copy_on_device);
  use("cuMemcpy2DAsync_v2", f.copy_2d);
  use("cuStreamCreate", f.stream_create);
  use("cuStreamDestroy_v2", f.stream_destroy);
  use("cuStreamGetCtx", f.stream_context);
  use("cuStreamQuery", f.stream_query);
  use("cuStreamWaitEvent", f.stream_wait_event);
  use("cuStreamIsCapturing", f.stream_is_capturing);
  use("cuThreadExchangeStreamCaptureMode", f.exchange_capture_mode);
  use("cuEventCreate", f.event_create);
  use("cuEventDestroy_v2", f.event_destroy);
  use("cuEventRecord", f.event_record);
  use("cuEventQuery", f.event_query);
  use("cuIpcGetMemHandle", f.ipc_export);
  use("cuIpcOpenMemHandle_v2", f.ipc_open);
  use("cuIpcCloseMemHandle", f.ipc_close);
}

// For graphs: a driver that is too old for them does everything else.

using GraphHandle = ::CUgraph_st*;
using GraphExecHandle = ::CUgraphExec_st*;

/// CUstreamCaptureMode: what other threads do is no harm. NCCL has threads of its own.
inline constexpr int capture_mode_thread_local = 1;

struct GraphFunctions {
  Status (*begin_capture)(StreamHandle, int) = nullptr;
  Status (*end_capture)(StreamHandle, GraphHandle*) = nullptr;
  Status (*instantiate)(GraphExecHandle*, GraphHandle, unsigned long long) = nullptr;
  Status (*launch)(GraphExecHandle, StreamHandle) = nullptr;
  Status (*destroy)(GraphHandle) = nullptr;
  Status (*destroy_exec)(GraphExecHandle) = nullptr;
};

template <class Functions, class Use>
void for_each_graph_function(Functions& f, const Use& use) {
  use("cuStreamBeginCapture_v2", f.begin_capture);
  use("cuStreamEndCapture", f.end_capture);
  use("cuGraphInstantiateWithFlags", f.instantiate);
  use("cuGraphLaunch", f.launch);
  use("cuGraphDestroy", f.destroy);
  use("cuGraphExecDestroy", f.destroy_exec);
}

}  // namespace muster::cuda
