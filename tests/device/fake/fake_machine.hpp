// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the fake driver is made of: memory, streams, and what it counts (fake_cuda.hpp).

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "src/device/driver_api.hpp"

struct CUctx_st {
  int device;
};

struct CUstream_st {
  int device = 0;
  CUctx_st* context = nullptr;
  bool is_blocking = true;
  std::uint64_t done = 0;  // steps that it has taken
  bool is_capturing = false;
  bool is_gone = false;
  std::deque<std::function<bool()>> steps;
  std::vector<std::function<bool()>> captured;  // what a graph of it would do
  [[nodiscard]] std::uint64_t end() const { return done + steps.size(); }
};

/// What was captured; graphs that can be run are the same.
struct CUgraph_st {
  int device = 0;
  std::vector<std::function<bool()>> steps;
};

struct CUevent_st {
  int device = 0;
  // What must have happened: so many steps of each of these streams.
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
  DevicePointer base = 0;  // what the program sees
  std::byte* real = nullptr;
  std::size_t bytes = 0;
  std::size_t mapped = 0;
  int device = 0;
  int file = -1;
  std::uint64_t buffer = 0;
  bool is_exportable = true;
  bool is_managed = false;
  bool is_opened = false;  // of another process
  // Of what is opened: whose, where it is there, and how often it was opened.
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
  std::multimap<std::size_t, void*> free_addresses;  // by size: used again at once, as a driver does
  std::vector<std::pair<Memory, Marks>> dying;       // freed while something was under way on the device
  std::map<std::uintptr_t, std::size_t> locked;      // host memory that devices reach
  std::map<std::uintptr_t, std::size_t> host_allocated;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<CUevent_st>> events;
  std::vector<std::unique_ptr<CUgraph_st>> graphs;
  std::map<std::string, std::uint64_t> calls;
  std::uint64_t next_buffer = 1;
  std::uint64_t pageable_copies = 0;
  std::uint64_t used = 0;
  bool is_capture_broken = false;
  Status broken = Status::success;  // what has failed on a device fails from then on
};

State& state();
/// The thread's current devices, the last one on top.
std::vector<CUctx_st*>& current();
std::uint64_t setting(const char* name, std::uint64_t otherwise);
int devices();
/// What a call needs and does.
struct Kind {
  bool needs_context = false;
  /// Not a part of a graph, though something of it might be meant to be: forbidden while a stream is captured, and the
  /// end of that capture, but for a thread that has said that it knows.
  bool is_unsafe = false;
};
inline constexpr Kind in_context{.needs_context = true};
inline constexpr Kind unsafe{.needs_context = true, .is_unsafe = true};
/// Counts a call, and says how it goes.
Status enter(const char* name, Kind kind = {});
/// CUstreamCaptureMode of the thread.
int& capture_mode();
bool contains(const std::map<std::uintptr_t, std::size_t>& ranges, std::uintptr_t at, std::size_t bytes);

/// The allocation that an address is in; null where there is none.
Memory* find(DevicePointer pointer);
/// Where so many bytes really are; null where they are in no allocation.
std::byte* real_of(DevicePointer pointer, std::size_t bytes);
Status allocate(DevicePointer* pointer, std::size_t bytes, bool is_exportable);
void release(Memory& memory);
/// The same when the device has done what it has now, for which a driver would wait.
void release_after_work(Memory& memory);
/// How the driver sees `bytes` of the host.
enum class HostMemory { locked, ordinary, in_part };
HostMemory host_memory(const void* address, std::size_t bytes);

/// 0 and 1 are the default stream of the current device.
CUstream_st* stream_of(CUstream_st* stream);
/// Whether something may be put there: not where the stream is gone, nor, with the end of a capture, into the default
/// stream while one that waits for it is captured.
Status use(CUstream_st* stream);
/// The CPU waits, inside of the driver, until the stream has done all; for ever where the device hangs.
void drain(CUstream_st* stream);
/// What must have happened for all that is in the stream now.
std::vector<std::pair<CUstream_st*, std::uint64_t>> marks_of(CUstream_st* stream);
bool have_passed(const std::vector<std::pair<CUstream_st*, std::uint64_t>>& marks);
/// Something that the stream does when it comes to it, again and again until it is true. While the stream is captured
/// it becomes a part of the graph, each of whose runs begins with it as it is here.
void put(CUstream_st* stream, std::function<bool()> step);
/// Lets every stream do one thing.
void tick();

}  // namespace fake

#define LOCKED const std::lock_guard lock(fake::state().mutex)
#define ENTER(...) \
  LOCKED;          \
  if (const fake::Status entered = fake::enter(__VA_ARGS__); entered != fake::Status::success) return entered
