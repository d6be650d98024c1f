// SPDX-License-Identifier: Apache-2.0
// Compares src/cuda/driver_api.hpp with NVIDIA's cuda.h. A difference is a compile error.

#include <cuda.h>

#include <cstddef>

#include "src/cuda/driver_api.hpp"
#include "tests/device/declarations.hpp"

namespace muster::cuda {
namespace {

using Ours = DriverFunctions;
#define SAME(member, function) static_assert(test::Alike<decltype(Ours::member)::Pointer, decltype(&::function)>::value)
SAME(init, cuInit);
SAME(driver_version, cuDriverGetVersion);
SAME(error_name, cuGetErrorName);
SAME(error_string, cuGetErrorString);
SAME(device_count, cuDeviceGetCount);
SAME(device_get, cuDeviceGet);
SAME(device_name, cuDeviceGetName);
SAME(device_uuid, cuDeviceGetUuid);
SAME(device_total_memory, cuDeviceTotalMem);
SAME(device_attribute, cuDeviceGetAttribute);
SAME(primary_context, cuDevicePrimaryCtxRetain);
SAME(push_context, cuCtxPushCurrent);
SAME(pop_context, cuCtxPopCurrent);
SAME(current_context, cuCtxGetCurrent);
SAME(current_device, cuCtxGetDevice);
SAME(pointer_attribute, cuPointerGetAttribute);
SAME(address_range, cuMemGetAddressRange);
SAME(memory_info, cuMemGetInfo);
SAME(allocate, cuMemAlloc);
SAME(free, cuMemFree);
SAME(host_allocate, cuMemHostAlloc);
SAME(host_free, cuMemFreeHost);
SAME(host_register, cuMemHostRegister);
SAME(host_unregister, cuMemHostUnregister);
SAME(copy_to_host, cuMemcpyDtoHAsync);
SAME(copy_to_device, cuMemcpyHtoDAsync);
SAME(copy_on_device, cuMemcpyDtoDAsync);
SAME(copy_2d, cuMemcpy2DAsync);
SAME(stream_create, cuStreamCreate);
SAME(stream_destroy, cuStreamDestroy);
SAME(stream_context, cuStreamGetCtx);
SAME(stream_query, cuStreamQuery);
SAME(stream_wait_event, cuStreamWaitEvent);
SAME(stream_is_capturing, cuStreamIsCapturing);
SAME(exchange_capture_mode, cuThreadExchangeStreamCaptureMode);
SAME(event_create, cuEventCreate);
SAME(event_destroy, cuEventDestroy);
SAME(event_record, cuEventRecord);
SAME(event_query, cuEventQuery);
SAME(ipc_export, cuIpcGetMemHandle);
SAME(ipc_open, cuIpcOpenMemHandle);
SAME(ipc_close, cuIpcCloseMemHandle);
#undef SAME
#define SAME(member, function) \
  static_assert(test::Alike<decltype(GraphFunctions::member)::Pointer, decltype(&::function)>::value)
SAME(begin_capture, cuStreamBeginCapture);
SAME(end_capture, cuStreamEndCapture);
SAME(instantiate, cuGraphInstantiateWithFlags);
SAME(launch, cuGraphLaunch);
SAME(destroy, cuGraphDestroy);
SAME(destroy_exec, cuGraphExecDestroy);
#undef SAME

constexpr int number(Status status) {
  return static_cast<int>(status);
}
static_assert(number(Status::success) == CUDA_SUCCESS);
static_assert(number(Status::invalid_value) == CUDA_ERROR_INVALID_VALUE);
static_assert(number(Status::out_of_memory) == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(number(Status::not_initialized) == CUDA_ERROR_NOT_INITIALIZED);
static_assert(number(Status::no_device) == CUDA_ERROR_NO_DEVICE);
static_assert(number(Status::invalid_device) == CUDA_ERROR_INVALID_DEVICE);
static_assert(number(Status::invalid_context) == CUDA_ERROR_INVALID_CONTEXT);
static_assert(number(Status::already_mapped) == CUDA_ERROR_ALREADY_MAPPED);
static_assert(number(Status::not_ready) == CUDA_ERROR_NOT_READY);
static_assert(number(Status::already_registered) == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
static_assert(number(Status::not_registered) == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
static_assert(number(Status::stream_capture_unsupported) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
static_assert(number(Status::stream_capture_implicit) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
static_assert(number(Status::captured_event) == CUDA_ERROR_CAPTURED_EVENT);
static_assert(pointer_memory_type == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(pointer_buffer_id == CU_POINTER_ATTRIBUTE_BUFFER_ID);
static_assert(pointer_is_managed == CU_POINTER_ATTRIBUTE_IS_MANAGED);
static_assert(pointer_device_ordinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(pointer_is_exportable == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
static_assert(device_max_pitch == CU_DEVICE_ATTRIBUTE_MAX_PITCH);
static_assert(capture_mode_relaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(capture_mode_thread_local == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
static_assert(capture_none == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(memory_host == CU_MEMORYTYPE_HOST);
static_assert(memory_device == CU_MEMORYTYPE_DEVICE);
static_assert(stream_non_blocking == CU_STREAM_NON_BLOCKING);
static_assert(event_disable_timing == CU_EVENT_DISABLE_TIMING);
static_assert(host_register_portable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(host_alloc_portable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(ipc_lazy_peer_access == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);

static_assert(sizeof(Uuid) == sizeof(CUuuid));
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(Copy2d) == sizeof(CUDA_MEMCPY2D));
#define AT(ours, theirs) static_assert(offsetof(Copy2d, ours) == offsetof(CUDA_MEMCPY2D, theirs))
AT(source_x, srcXInBytes);
AT(source_y, srcY);
AT(source_type, srcMemoryType);
AT(source_host, srcHost);
AT(source_device, srcDevice);
AT(source_array, srcArray);
AT(source_pitch, srcPitch);
AT(target_x, dstXInBytes);
AT(target_y, dstY);
AT(target_type, dstMemoryType);
AT(target_host, dstHost);
AT(target_device, dstDevice);
AT(target_array, dstArray);
AT(target_pitch, dstPitch);
AT(width, WidthInBytes);
AT(height, Height);
#undef AT

}  // namespace
}  // namespace muster::cuda
