// SPDX-License-Identifier: Apache-2.0
// The fake driver's memory: allocations, page locks, copies, CUDA IPC.

#include <fcntl.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "tests/device/fake/fake_machine.hpp"

using namespace fake;

namespace {

enum class Direction { to_host, to_device, on_device };

struct Rows {
  std::byte* begin;
  std::size_t pitch;
};

/// All copies use this function. With pageable host memory the driver copies through its own buffers, and the CPU waits
/// in it. Copies to the host wait for the bytes. Copies to the device wait until the stream is empty and the bytes are
/// in a buffer.
Status copy_rows(Rows to, Rows from, std::size_t width, std::size_t rows, CUstream_st* handle, Direction direction) {
  CUstream_st* const stream = stream_of(handle);
  if (to.begin == nullptr || from.begin == nullptr) return Status::invalid_value;
  if (const Status usable = use(stream); usable != Status::success) return usable;
  const Rows& side = direction == Direction::to_host ? to : from;
  const HostMemory memory =
      direction == Direction::on_device ? HostMemory::locked : host_memory(side.begin, (rows - 1) * side.pitch + width);
  if (memory == HostMemory::in_part) return Status::invalid_value;
  const bool is_ordinary = memory == HostMemory::ordinary;
  // Captured work runs only when the graph runs.
  if (is_ordinary && stream->is_capturing) return Status::stream_capture_unsupported;
  std::shared_ptr<std::vector<std::byte>> buffer;
  if (is_ordinary && direction == Direction::to_device) {
    drain(stream);
    buffer = std::make_shared<std::vector<std::byte>>(from.begin, from.begin + (rows - 1) * from.pitch + width);
    from.begin = buffer->data();
  }
  put(stream, [=] {
    (void)buffer;
    for (std::size_t row = 0; row < rows; ++row)
      std::memcpy(to.begin + row * to.pitch, from.begin + row * from.pitch, width);
    return true;
  });
  if (is_ordinary && direction == Direction::to_host) drain(stream);
  return Status::success;
}

}  // namespace

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
      *static_cast<unsigned*>(data) = memory != nullptr && memory->is_managed ? 1 : 0;
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
  ENTER("cuMemGetAddressRange_v2", in_context);
  const Memory* memory = find(pointer);
  if (memory == nullptr) return Status::invalid_value;
  *base = memory->base;
  *bytes = memory->bytes;
  return Status::success;
}

Status cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  ENTER("cuMemGetInfo_v2", in_context);
  *total = setting("FAKE_CUDA_MEMORY", std::uint64_t{4} << 30);
  *free = *total - state().used;
  return Status::success;
}

Status cuMemAlloc_v2(DevicePointer* pointer, std::size_t bytes) {
  ENTER("cuMemAlloc_v2", unsafe);
  return allocate(pointer, bytes, true);
}

Status cuMemFree_v2(DevicePointer pointer) {
  ENTER("cuMemFree_v2", unsafe);
  const auto found = state().memory.find(pointer);
  if (found == state().memory.end() || found->second.is_opened) return Status::invalid_value;
  release_after_work(found->second);
  return Status::success;
}

Status cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
  ENTER("cuMemHostAlloc", unsafe);
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*memory == nullptr) return Status::out_of_memory;
  state().host_allocated[reinterpret_cast<std::uintptr_t>(*memory)] = bytes;
  return Status::success;
}

Status cuMemFreeHost(void* memory) {
  ENTER("cuMemFreeHost", unsafe);
  if (state().host_allocated.erase(reinterpret_cast<std::uintptr_t>(memory)) == 0) return Status::invalid_value;
  std::free(memory);
  return Status::success;
}

Status cuMemHostRegister_v2(void* memory, std::size_t bytes, unsigned) {
  ENTER("cuMemHostRegister_v2", unsafe);
  const auto at = reinterpret_cast<std::uintptr_t>(memory);
  if (bytes == 0) return Status::invalid_value;
  // Whole pages are locked, and each of them only once.
  const std::uintptr_t begin = at / 4096 * 4096;
  const std::uintptr_t end = (at + bytes + 4095) / 4096 * 4096;
  for (const auto& [base, size] : state().locked)
    if (base / 4096 * 4096 < end && begin < (base + size + 4095) / 4096 * 4096) return Status::already_registered;
  // Like the driver, this touches all pages, so they must exist.
  for (std::size_t page = 0; page < bytes; page += 4096)
    static_cast<volatile std::byte*>(memory)[page] = static_cast<volatile std::byte*>(memory)[page];
  state().locked[at] = bytes;
  return Status::success;
}

Status cuMemHostUnregister(void* memory) {
  ENTER("cuMemHostUnregister", unsafe);
  return state().locked.erase(reinterpret_cast<std::uintptr_t>(memory)) == 0 ? Status::not_registered : Status::success;
}

Status cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t bytes, CUstream_st* stream) {
  ENTER("cuMemcpyDtoHAsync_v2", in_context);
  return copy_rows({static_cast<std::byte*>(to), bytes}, {real_of(from, bytes), bytes}, bytes, 1, stream,
                   Direction::to_host);
}

Status cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t bytes, CUstream_st* stream) {
  ENTER("cuMemcpyHtoDAsync_v2", in_context);
  auto* const source = static_cast<std::byte*>(const_cast<void*>(from));
  return copy_rows({real_of(to, bytes), bytes}, {source, bytes}, bytes, 1, stream, Direction::to_device);
}

Status cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, std::size_t bytes, CUstream_st* stream) {
  ENTER("cuMemcpyDtoDAsync_v2", in_context);
  return copy_rows({real_of(to, bytes), bytes}, {real_of(from, bytes), bytes}, bytes, 1, stream, Direction::on_device);
}

Status cuMemcpy2DAsync_v2(const Copy2d* asked, CUstream_st* stream) {
  ENTER("cuMemcpy2DAsync_v2", in_context);
  const Copy2d c = *asked;
  const std::uint64_t most = setting("FAKE_CUDA_MAX_PITCH", max_pitch);
  const bool is_on_device = c.target_type == muster::cuda::memory_device;
  if (c.source_type != muster::cuda::memory_device || (c.target_type != muster::cuda::memory_host && !is_on_device) ||
      c.source_pitch < c.width || c.target_pitch < c.width || c.height == 0 || c.source_pitch > most ||
      c.target_pitch > most)
    return Status::invalid_value;
  const Rows from{real_of(c.source_device, (c.height - 1) * c.source_pitch + c.width), c.source_pitch};
  const Rows to{is_on_device ? real_of(c.target_device, (c.height - 1) * c.target_pitch + c.width)
                             : static_cast<std::byte*>(c.target_host),
                c.target_pitch};
  return copy_rows(to, from, c.width, c.height, stream, is_on_device ? Direction::on_device : Direction::to_host);
}

Status cuIpcGetMemHandle(IpcHandle* handle, DevicePointer pointer) {
  ENTER("cuIpcGetMemHandle", unsafe);
  const Memory* memory = find(pointer);
  // Must be the base of an allocation, as the documentation requires.
  if (memory == nullptr || memory->base != pointer || !memory->is_exportable || memory->is_opened)
    return Status::invalid_value;
  const Shown shown{::getpid(), memory->file, memory->bytes, memory->base, memory->buffer, memory->device};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &shown, sizeof shown);
  return Status::success;
}

Status cuIpcOpenMemHandle_v2(DevicePointer* pointer, IpcHandle handle, unsigned flags) {
  ENTER("cuIpcOpenMemHandle_v2", unsafe);
  Shown shown{};
  std::memcpy(&shown, &handle, sizeof shown);
  if (shown.pid == ::getpid()) return Status::invalid_context;
  if (flags != muster::cuda::ipc_lazy_peer_access) return Status::invalid_value;
  for (auto& [base, open] : state().memory) {
    if (!open.is_opened || open.owner != shown.pid) continue;
    if (open.owner_buffer == shown.buffer) {
      ++open.opens;
      *pointer = open.base;
      return Status::success;
    }
    // The owner has freed an earlier allocation at this address, which is still open here.
    if (open.owner_base < shown.base + shown.bytes && shown.base < open.owner_base + open.bytes)
      return Status::already_mapped;
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", shown.pid, shown.file);
  Memory memory;
  memory.file = ::open(path, O_RDWR | O_CLOEXEC);
  if (memory.file < 0) return invalid_handle;
  memory.bytes = shown.bytes;
  memory.mapped = (shown.bytes + 4095) / 4096 * 4096;
  memory.device = shown.device;
  memory.is_opened = true;
  memory.owner = shown.pid;
  memory.owner_base = shown.base;
  memory.owner_buffer = shown.buffer;
  memory.opens = 1;
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
  ENTER("cuIpcCloseMemHandle", unsafe);
  const auto found = state().memory.find(pointer);
  if (found == state().memory.end() || !found->second.is_opened) return Status::invalid_value;
  if (--found->second.opens != 0) return Status::success;
  release(found->second);
  return Status::success;
}

}  // extern "C"
