// SPDX-License-Identifier: Apache-2.0
#pragma once
// The components of the fake driver: memory, streams, and counters (fake_cuda.hpp).

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "src/cuda/driver_api.hpp"

struct CUctx_st {
  int device;
};

struct CUstream_st {
  int device = 0;
  CUctx_st* context = nullptr;
  bool is_blocking = true;
  std::uint64_t done = 0;  // number of completed steps
  bool is_capturing = false;
  bool is_gone = false;
  std::deque<std::function<bool()>> steps;
  std::vector<std::function<bool()>> captured;  // steps of its graph
  [[nodiscard]] std::uint64_t end() const { return done + steps.size(); }
};

/// The captured steps; an executable graph has the same type.
struct CUgraph_st {
  int device = 0;
  std::vector<std::function<bool()>> steps;
};

struct CUevent_st {
  int device = 0;
  // The event has happened when each of these streams has done this number of steps.
  std::vector<std::pair<CUstream_st*, std::uint64_t>> marks;
  bool is_captured = false;
};

namespace fake {

using muster::cuda::Copy2d;
using muster::cuda::DevicePointer;
using muster::cuda::IpcHandle;
using muster::cuda::Status;
using muster::cuda::Uuid;

inline constexpr std::uint64_t max_pitch = 0x7fffffff;
inline constexpr auto invalid_handle = static_cast<Status>(400);

struct Memory {
  DevicePointer base = 0;  // the address that the program gets
  std::byte* real = nullptr;
  std::size_t bytes = 0;
  std::size_t mapped = 0;
  int device = 0;
  int file = -1;
  std::uint64_t buffer = 0;
  bool is_exportable = true;
  bool is_managed = false;
  bool is_opened = false;  // opened from another process
  // For opened memory: the owner, the owner's address, and the number of opens.
  pid_t owner = 0;
  DevicePointer owner_base = 0;
  std::uint64_t owner_buffer = 0;
  std::uint64_t opens = 0;
};

struct Shown {
  std::int32_t pid;
  std::int32_t file;
  std::uint64_t bytes;
  std::uint64_t base;
  std::uint64_t buffer;
  std::int32_t device;
};
static_assert(sizeof(Shown) <= sizeof(IpcHandle));

using Marks = std::vector<std::pair<CUstream_st*, std::uint64_t>>;

struct State {
  std::mutex mutex;
  pid_t pid = 0;
  std::vector<std::unique_ptr<CUctx_st>> contexts;
  std::vector<std::unique_ptr<CUstream_st>> defaults;  // by device
  std::map<DevicePointer, Memory> memory;
  std::multimap<std::size_t, void*> free_addresses;  // by size: reused at once, like by a driver
  std::vector<std::pair<Memory, Marks>> dying;       // freed while the device had pending work
  std::map<std::uintptr_t, std::size_t> locked;      // page-locked host memory
  std::map<std::uintptr_t, std::size_t> host_allocated;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<CUevent_st>> events;
  std::vector<std::unique_ptr<CUgraph_st>> graphs;
  std::map<std::string, std::uint64_t> calls;
  std::uint64_t next_buffer = 1;
  std::uint64_t pageable_copies = 0;
  std::uint64_t used = 0;
  bool is_capture_broken = false;
  Status broken = Status::success;  // a device failure is permanent
};

State& state();
/// The thread's current contexts, the last one on top.
std::vector<CUctx_st*>& current();
std::uint64_t setting(const char* name, std::uint64_t otherwise);
int devices();
/// The requirements and effects of a call.
struct Kind {
  bool needs_context = false;
  /// Not allowed while a stream is captured, because it cannot be part of a graph. The call ends that capture, unless
  /// the thread's capture mode allows it.
  bool is_unsafe = false;
};
inline constexpr Kind in_context{.needs_context = true};
inline constexpr Kind unsafe{.needs_context = true, .is_unsafe = true};
/// Counts a call, and returns its status.
Status enter(const char* name, Kind kind = {});
/// CUstreamCaptureMode of the thread.
int& capture_mode();
bool contains(const std::map<std::uintptr_t, std::size_t>& ranges, std::uintptr_t at, std::size_t bytes);

/// Returns the allocation that contains an address, or null.
Memory* find(DevicePointer pointer);
/// Returns the real address of `bytes` bytes, or null if they are not in one allocation.
std::byte* real_of(DevicePointer pointer, std::size_t bytes);
Status allocate(DevicePointer* pointer, std::size_t bytes, bool is_exportable);
void release(Memory& memory);
/// Releases the memory when the device has done its pending work, for which a driver would wait.
void release_after_work(Memory& memory);
/// Returns how the driver classifies `bytes` bytes of host memory.
enum class HostMemory { locked, ordinary, in_part };
HostMemory host_memory(const void* address, std::size_t bytes);

/// 0 and 1 are the default stream of the current device.
CUstream_st* stream_of(CUstream_st* stream);
/// Returns whether work may be queued on a stream: not if it was destroyed. Also not if it is the default stream and a
/// stream that waits for it is captured, which ends the capture.
Status use(CUstream_st* stream);
/// Waits in the driver until the stream has done all its work; forever if the device hangs.
void drain(CUstream_st* stream);
/// Returns the steps after which all pending work of the stream is done.
std::vector<std::pair<CUstream_st*, std::uint64_t>> marks_of(CUstream_st* stream);
bool have_passed(const std::vector<std::pair<CUstream_st*, std::uint64_t>>& marks);
/// Queues a step, which the stream repeats until it returns true. While the stream is captured, the step becomes a part
/// of the graph, and each run starts with a copy of it.
void put(CUstream_st* stream, std::function<bool()> step);
/// Lets every stream do one step.
void tick();

}  // namespace fake

#define LOCKED const std::lock_guard lock(fake::state().mutex)
#define ENTER(...) \
  LOCKED;          \
  if (const fake::Status entered = fake::enter(__VA_ARGS__); entered != fake::Status::success) return entered
