// SPDX-License-Identifier: Apache-2.0
// The fake driver's memory: allocations, page locks, copies, CUDA IPC.

#include <fcntl.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "tests/device/fake/fake_machine.hpp"

using namespace fake;

extern "C" {

Status cuPointerGetAttribute(void* data, int attribute, DevicePointer pointer) {
  ENTER("cuPointerGetAttribute");
  const Memory* memory = find(pointer);
  const bool is_host = contains(state().locked, pointer, 1) || contains(state().host_allocated, pointer, 1);
  if (memory == nullptr && !is_host) return Status::invalid_value;
  switch (attribute) {
    case muster::cuda::pointer_memory_type:
      *static_cast<unsigned*>(data) = memory == nullptr ? muster::cuda::memory_host : muster::cuda::memory_device;
      return Status::success;
    case muster::cuda::pointer_is_managed:
      *static_cast<unsigned*>(data) = 0;
      return Status::success;
    case muster::cuda::pointer_device_ordinal:
      *static_cast<int*>(data) = memory == nullptr ? 0 : memory->device;
      return Status::success;
    case muster::cuda::pointer_buffer_id:
      *static_cast<unsigned long long*>(data) = memory == nullptr ? 0 : memory->buffer;
      return Status::success;
    case muster::cuda::pointer_is_exportable:
      *static_cast<unsigned char*>(data) = memory != nullptr && memory->is_exportable && !memory->is_opened ? 1 : 0;
      return Status::success;
    default:
      return Status::invalid_value;
  }
}

Status cuMemGetAddressRange_v2(DevicePointer* base, std::size_t* bytes, DevicePointer pointer) {
  ENTER("cuMemGetAddressRange_v2", true);
  const Memory* memory = find(pointer);
  if (memory == nullptr) return Status::invalid_value;
  *base = memory->base;
  *bytes = memory->bytes;
  return Status::success;
}

Status cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  ENTER("cuMemGetInfo_v2", true);
  *total = setting("FAKE_CUDA_MEMORY", std::uint64_t{4} << 30);
  *free = *total - state().used;
  return Status::success;
}

Status cuMemAlloc_v2(DevicePointer* pointer, std::size_t bytes) {
  ENTER("cuMemAlloc_v2", true);
  return allocate(pointer, bytes, true);
}

Status cuMemFree_v2(DevicePointer pointer) {
  ENTER("cuMemFree_v2", true);
  const auto found = state().memory.find(pointer);
  if (found == state().memory.end() || found->second.is_opened) return Status::invalid_value;
  release(found->second);
  return Status::success;
}

Status cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
  ENTER("cuMemHostAlloc", true);
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*memory == nullptr) return Status::out_of_memory;
  state().host_allocated[reinterpret_cast<std::uintptr_t>(*memory)] = bytes;
  return Status::success;
}

Status cuMemFreeHost(void* memory) {
  ENTER("cuMemFreeHost", true);
  if (state().host_allocated.erase(reinterpret_cast<std::uintptr_t>(memory)) == 0) return Status::invalid_value;
  std::free(memory);
  return Status::success;
}

Status cuMemHostRegister_v2(void* memory, std::size_t bytes, unsigned) {
  ENTER("cuMemHostRegister_v2", true);
  const auto at = reinterpret_cast<std::uintptr_t>(memory);
  if (contains(state().locked, at, 1)) return Status::already_registered;
  // As the driver does: all pages have to be there.
  for (std::size_t page = 0; page < bytes; page += 4096)
    static_cast<volatile std::byte*>(memory)[page] = static_cast<volatile std::byte*>(memory)[page];
  state().locked[at] = bytes;
  return Status::success;
}

Status cuMemHostUnregister(void* memory) {
  ENTER("cuMemHostUnregister", true);
  return state().locked.erase(reinterpret_cast<std::uintptr_t>(memory)) == 0 ? Status::not_registered : Status::success;
}

Status cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t bytes, CUstream_st* stream) {
  ENTER("cuMemcpyDtoHAsync_v2", true);
  return copy(host(to, bytes), real_of(from, bytes), bytes, stream);
}

Status cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t bytes, CUstream_st* stream) {
  ENTER("cuMemcpyHtoDAsync_v2", true);
  return copy(real_of(to, bytes), host(from, bytes), bytes, stream);
}

Status cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, std::size_t bytes, CUstream_st* stream) {
  ENTER("cuMemcpyDtoDAsync_v2", true);
  return copy(real_of(to, bytes), real_of(from, bytes), bytes, stream);
}

Status cuMemcpy2DAsync_v2(const Copy2d* asked, CUstream_st* stream) {
  ENTER("cuMemcpy2DAsync_v2", true);
  const Copy2d c = *asked;
  if (c.source_type != muster::cuda::memory_device || c.target_type != muster::cuda::memory_host ||
      c.source_pitch < c.width || c.target_pitch < c.width || c.height == 0)
    return Status::invalid_value;
  const std::byte* from = real_of(c.source_device, (c.height - 1) * c.source_pitch + c.width);
  std::byte* to = host(c.target_host, (c.height - 1) * c.target_pitch + c.width);
  if (from == nullptr) return Status::invalid_value;
  put(stream_of(stream), [=] {
    for (std::size_t row = 0; row < c.height; ++row)
      std::memcpy(to + row * c.target_pitch, from + row * c.source_pitch, c.width);
    return true;
  });
  return Status::success;
}

Status cuIpcGetMemHandle(IpcHandle* handle, DevicePointer pointer) {
  ENTER("cuIpcGetMemHandle", true);
  const Memory* memory = find(pointer);
  if (memory == nullptr || !memory->is_exportable || memory->is_opened) return Status::invalid_value;
  const Shown shown{::getpid(), memory->file, memory->bytes, memory->device};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &shown, sizeof shown);
  return Status::success;
}

Status cuIpcOpenMemHandle_v2(DevicePointer* pointer, IpcHandle handle, unsigned) {
  ENTER("cuIpcOpenMemHandle_v2", true);
  Shown shown{};
  std::memcpy(&shown, &handle, sizeof shown);
  if (shown.pid == ::getpid()) return Status::invalid_context;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", shown.pid, shown.file);
  Memory memory;
  memory.file = ::open(path, O_RDWR | O_CLOEXEC);
  if (memory.file < 0) return invalid_handle;
  memory.bytes = shown.bytes;
  memory.mapped = (shown.bytes + 4095) / 4096 * 4096;
  memory.device = shown.device;
  memory.is_opened = true;
  memory.buffer = state().next_buffer++;
  memory.real =
      static_cast<std::byte*>(::mmap(nullptr, memory.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, memory.file, 0));
  void* base = ::mmap(nullptr, memory.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  memory.base = reinterpret_cast<std::uintptr_t>(base);
  *pointer = memory.base;
  state().memory[memory.base] = memory;
  return Status::success;
}

Status cuIpcCloseMemHandle(DevicePointer pointer) {
  ENTER("cuIpcCloseMemHandle", true);
  const auto found = state().memory.find(pointer);
  if (found == state().memory.end() || !found->second.is_opened) return Status::invalid_value;
  release(found->second);
  return Status::success;
}

}  // extern "C"
