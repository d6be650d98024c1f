// SPDX-License-Identifier: Apache-2.0
#pragma once
// A fake CUDA driver for tests. It has no device, and a test that passes with it proves nothing about a real one. It
// replaces libcuda.so.1 (LD_LIBRARY_PATH) and enforces those rules of the driver whose violation would show as wrong
// bytes on a device:
//
//  - Device memory is mapped without access: a CPU read terminates the process.
//  - Streams make no progress by themselves: each query (event, stream) lets every stream do one step. Bytes that are
//    read too early are wrong.
//  - The default stream waits for all streams that were not made non-blocking; others wait for events only.
//  - Calls need a current device wherever the driver's calls do; an event belongs to the device of its stream.
//  - Other processes can open allocations, but not their owner; those of a pool cannot be opened. An allocation that
//    was opened twice is the same one, and must be closed twice. An allocation that its owner has freed must be closed
//    before the same addresses are opened again. Only the base of an allocation can be exported.
//  - Copies from and to pageable host memory wait for the stream, and the CPU waits with them. Copies across the edge
//    of locked memory are refused. Pages can be locked once.
//  - While a stream is captured into a graph, calls that cannot be captured are refused and end the capture. So does
//    the use of the default stream if the two wait for each other. Threads with a relaxed capture mode may query events
//    and allocate memory. Work that waits for a captured stream is captured, too.
//  - Rows that are too far apart are not copied. A destroyed stream is invalid.
//  - A process that was forked after the driver was started has no devices.
//
// Environment: FAKE_CUDA_DEVICES (2), FAKE_CUDA_MEMORY (bytes of a device), FAKE_CUDA_HOST (another host: other UUIDs),
// FAKE_CUDA_FAIL=FUNCTION:STATUS[:CALLS] (the function fails from that call on), FAKE_CUDA_HANG=1 (streams make no
// progress), FAKE_CUDA_ONE_DEVICE=1 (all devices are parts of one: the same UUID), FAKE_CUDA_MAX_PITCH (bytes).

#include <cstdint>
#include <functional>

extern "C" {
/// Returns the number of calls of a driver function in this process.
std::uint64_t fake_cuda_calls(const char* name);
/// Returns the number of copies to host memory that was not page-locked.
std::uint64_t fake_cuda_pageable_copies();
/// Returns the number of open page locks, allocations (device and host), streams, events or opened handles.
std::uint64_t fake_cuda_open(const char* what);
/// Makes an allocation that cannot be exported, like one of cudaMallocAsync.
int fake_cuda_allocate_from_pool(unsigned long long* pointer, std::uint64_t bytes);
/// Makes an allocation like one of cudaMallocManaged.
int fake_cuda_allocate_managed(unsigned long long* pointer, std::uint64_t bytes);
/// Makes a context that is not the primary one of its device.
void* fake_cuda_context(int device);
/// Begins or ends the capture of a stream. The second function returns whether no call has invalidated a capture.
void fake_cuda_capture(void* stream, bool begins);
bool fake_cuda_capture_is_whole();
/// All later calls fail with this status, as after a kernel with an invalid access.
void fake_cuda_break(int status);
/// The fake NCCL uses the following functions. This one queues a step, which the stream repeats until it returns true.
void fake_cuda_enqueue(void* stream, std::function<bool()>* step);
/// Returns the stream of a handle, while its device is current.
void* fake_cuda_stream(void* stream);
/// Returns the real address of device memory.
void* fake_cuda_memory(const void* pointer);
/// Lets every stream do one step.
void fake_cuda_tick();
/// Writes the UUID of the current device.
int fake_cuda_current_uuid(unsigned char* uuid);
}
