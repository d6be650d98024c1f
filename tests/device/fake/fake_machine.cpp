// SPDX-License-Identifier: Apache-2.0
#include "tests/device/fake/fake_machine.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace fake {

State& state() {
  static auto* const it = new State;
  return *it;
}

std::vector<CUctx_st*>& current() {
  static thread_local std::vector<CUctx_st*> stack;
  return stack;
}

std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

int devices() {
  return static_cast<int>(setting("FAKE_CUDA_DEVICES", 2));
}

/// Counts a call, and returns its status.
Status enter(const char* name, Kind kind) {
  State& s = state();
  const std::uint64_t calls = ++s.calls[name];
  if (const char* failing = std::getenv("FAKE_CUDA_FAIL")) {
    char function[64] = {};
    int status = 0;
    unsigned long from = 1;
    if (std::sscanf(failing, "%63[^:]:%d:%lu", function, &status, &from) >= 2 && std::strcmp(function, name) == 0 &&
        calls >= from)
      return static_cast<Status>(status);
  }
  if (s.pid != ::getpid()) return Status::not_initialized;
  if (s.broken != Status::success) return s.broken;
  if (kind.needs_context && current().empty()) return Status::invalid_context;
  if (kind.is_unsafe && capture_mode() != muster::cuda::capture_mode_relaxed &&
      std::ranges::any_of(s.streams, [](const auto& stream) { return stream->is_capturing; })) {
    s.is_capture_broken = true;
    return Status::stream_capture_unsupported;
  }
  return Status::success;
}

int& capture_mode() {
  static thread_local int mode = 0;
  return mode;
}

Status use(CUstream_st* stream) {
  if (stream->is_gone) return invalid_handle;
  State& s = state();
  if (stream != s.defaults[static_cast<std::size_t>(stream->device)].get()) return Status::success;
  if (std::ranges::none_of(s.streams, [&](const auto& other) {
        return other->is_capturing && other->is_blocking && other->device == stream->device;
      }))
    return Status::success;
  s.is_capture_broken = true;
  return Status::stream_capture_implicit;
}

void drain(CUstream_st* stream) {
  while (!stream->steps.empty()) {
    tick();
    if (setting("FAKE_CUDA_HANG", 0) != 0) ::usleep(1000);
  }
}

Memory* find(DevicePointer pointer) {
  State& s = state();
  auto after = s.memory.upper_bound(pointer);
  if (after == s.memory.begin()) return nullptr;
  Memory& memory = std::prev(after)->second;
  return pointer < memory.base + memory.bytes ? &memory : nullptr;
}

bool contains(const std::map<std::uintptr_t, std::size_t>& ranges, std::uintptr_t at, std::size_t bytes) {
  auto after = ranges.upper_bound(at);
  if (after == ranges.begin()) return false;
  const auto& [base, size] = *std::prev(after);
  return at >= base && at + bytes <= base + size;
}

std::byte* real_of(DevicePointer pointer, std::size_t bytes) {
  Memory* memory = find(pointer);
  if (memory == nullptr || pointer + bytes > memory->base + memory->bytes) return nullptr;
  return memory->real + (pointer - memory->base);
}

CUstream_st* stream_of(CUstream_st* stream) {
  // 0 and 1 are the default stream of the current device.
  if (reinterpret_cast<std::uintptr_t>(stream) > 1) return stream;
  return state().defaults[static_cast<std::size_t>(current().back()->device)].get();
}

/// The default stream and the blocking streams of its device wait for each other.
std::vector<std::pair<CUstream_st*, std::uint64_t>> marks_of(CUstream_st* stream) {
  std::vector<std::pair<CUstream_st*, std::uint64_t>> marks{{stream, stream->end()}};
  if (stream != state().defaults[static_cast<std::size_t>(stream->device)].get()) return marks;
  for (const auto& other : state().streams)
    if (other->is_blocking && other->device == stream->device) marks.emplace_back(other.get(), other->end());
  return marks;
}

bool have_passed(const std::vector<std::pair<CUstream_st*, std::uint64_t>>& marks) {
  for (const auto& [stream, count] : marks)
    if (stream->done < count) return false;
  return true;
}

void put(CUstream_st* stream, std::function<bool()> step) {
  if (stream->is_capturing) return stream->captured.push_back(std::move(step));
  auto marks = marks_of(stream);
  marks.erase(marks.begin());  // the stream itself: its steps are in order anyway
  stream->steps.push_back([marks = std::move(marks), step = std::move(step)] { return have_passed(marks) && step(); });
}

namespace {

void unmap(const Memory& memory) {
  ::munmap(memory.real, memory.mapped);
  void* const shown = reinterpret_cast<void*>(static_cast<std::uintptr_t>(memory.base));
  if (memory.is_opened)
    ::munmap(shown, memory.mapped);
  else
    state().free_addresses.emplace(memory.mapped, shown);
  ::close(memory.file);
}

}  // namespace

void tick() {
  if (setting("FAKE_CUDA_HANG", 0) != 0) return;
  State& s = state();
  const auto one = [](CUstream_st& stream) {
    if (stream.steps.empty() || !stream.steps.front()()) return;
    stream.steps.pop_front();
    ++stream.done;
  };
  for (const auto& stream : s.streams)
    if (!stream->is_capturing) one(*stream);
  for (const auto& stream : s.defaults) one(*stream);
  std::erase_if(s.dying, [](const auto& each) {
    if (!have_passed(each.second)) return false;
    unmap(each.first);
    return true;
  });
}

Status allocate(DevicePointer* pointer, std::size_t bytes, bool is_exportable) {
  State& s = state();
  if (bytes == 0) return Status::invalid_value;
  if (s.used + bytes > setting("FAKE_CUDA_MEMORY", std::uint64_t{4} << 30)) return Status::out_of_memory;
  Memory memory;
  memory.bytes = bytes;
  memory.mapped = (bytes + 4095) / 4096 * 4096;
  memory.device = current().back()->device;
  memory.is_exportable = is_exportable;
  memory.file = ::memfd_create("fake device", MFD_CLOEXEC);
  if (memory.file < 0 || ::ftruncate(memory.file, static_cast<off_t>(memory.mapped)) != 0) return Status::out_of_memory;
  memory.real =
      static_cast<std::byte*>(::mmap(nullptr, memory.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, memory.file, 0));
  void* shown = nullptr;
  if (const auto free = s.free_addresses.find(memory.mapped); free != s.free_addresses.end()) {
    shown = free->second;
    s.free_addresses.erase(free);
  } else {
    shown = ::mmap(nullptr, memory.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  memory.base = reinterpret_cast<std::uintptr_t>(shown);
  memory.buffer = s.next_buffer++;
  std::memset(memory.real, 0xd5, memory.bytes);  // marks memory that no one has written
  s.used += bytes;
  *pointer = memory.base;
  s.memory[memory.base] = memory;
  return Status::success;
}

void release(Memory& memory) {
  if (!memory.is_opened) state().used -= memory.bytes;
  unmap(memory);
  state().memory.erase(memory.base);
}

void release_after_work(Memory& memory) {
  Marks marks;
  for (const auto* streams : {&state().streams, &state().defaults})
    for (const auto& stream : *streams)
      if (stream->device == memory.device && !stream->steps.empty()) marks.emplace_back(stream.get(), stream->end());
  if (marks.empty()) return release(memory);
  state().used -= memory.bytes;
  state().dying.emplace_back(memory, std::move(marks));
  state().memory.erase(memory.base);
}

HostMemory host_memory(const void* address, std::size_t bytes) {
  State& s = state();
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (const auto* ranges : {&s.locked, &s.host_allocated}) {
    if (contains(*ranges, at, bytes)) return HostMemory::locked;
    // Only the beginning or the end is in locked pages: the driver does not copy across the edge.
    if (contains(*ranges, at, 1) || contains(*ranges, at + bytes - 1, 1)) return HostMemory::in_part;
  }
  ++s.pageable_copies;
  return HostMemory::ordinary;
}

}  // namespace fake
