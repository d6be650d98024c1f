// SPDX-License-Identifier: Apache-2.0
#pragma once
// A CUDA driver for tests, which is none: no device is there, and nothing that passes with it has been seen to work on
// one. It stands in for libcuda.so.1 (LD_LIBRARY_PATH) and keeps the driver's rules where breaking them would show as
// wrong bytes on a device:
//
//  - Memory of a device is mapped without access: whoever reads it with the CPU dies.
//  - Streams do nothing by themselves: each question (event, stream) lets every stream do one thing. Bytes that are
//    looked at too early are wrong.
//  - The default stream waits for all that were not made non-blocking; others wait for events only.
//  - Calls need a current device where the driver's do; an event belongs to the device of its stream.
//  - Allocations can be opened by other processes, not by their own; those of a pool cannot.
//    Opened twice it is one and has to be closed twice; what its owner has freed must be closed before the same
//    addresses are opened anew. Only the base of an allocation is exported.
//  - Copies from and to host memory that is not page-locked wait for the stream, and the CPU with them; those over the
//    edge of what is locked are refused. Pages are locked once.
//  - While a stream is captured into a graph, calls that are no part of one are refused and end the capture, and so
//    does the default stream's use where they wait for each other; threads that are relaxed about it may ask events and
//    take memory. What waits for a captured stream is captured, too.
//  - Rows that are too far apart are not copied. A stream that is gone is no stream.
//  - A process that was forked after the driver was started has none.
//
// Environment: FAKE_CUDA_DEVICES (2), FAKE_CUDA_MEMORY (bytes of a device), FAKE_CUDA_HOST (another one: other UUIDs),
// FAKE_CUDA_FAIL=FUNCTION:STATUS[:CALLS] (it fails from that call on), FAKE_CUDA_HANG=1 (streams never move),
// FAKE_CUDA_ONE_DEVICE=1 (all devices are parts of one: the same UUID), FAKE_CUDA_MAX_PITCH (bytes).

#include <cstdint>
#include <functional>

extern "C" {
/// How often a function of the driver was called in this process.
std::uint64_t fake_cuda_calls(const char* name);
/// Copies to host memory that was not page-locked.
std::uint64_t fake_cuda_pageable_copies();
/// Page locks, allocations (device and host), streams, events, opened handles that still are.
std::uint64_t fake_cuda_open(const char* what);
/// An allocation that cannot be exported, like one of cudaMallocAsync.
int fake_cuda_allocate_from_pool(unsigned long long* pointer, std::uint64_t bytes);
/// One of cudaMallocManaged.
int fake_cuda_allocate_managed(unsigned long long* pointer, std::uint64_t bytes);
/// One that is not the primary one of its device.
void* fake_cuda_context(int device);
/// A capture of a stream begins or ends; whether nothing has spoilt one.
void fake_cuda_capture(void* stream, bool begins);
bool fake_cuda_capture_is_whole();
/// From now on every call fails with that status, as after a kernel that has gone astray.
void fake_cuda_break(int status);
/// For the fake NCCL: something that a stream does in steps, until it says that it is done; which stream a handle is,
/// while its device is current; where a device's memory really is; the UUID of the current device.
void fake_cuda_enqueue(void* stream, std::function<bool()>* step);
void* fake_cuda_stream(void* stream);
void* fake_cuda_memory(const void* pointer);
void fake_cuda_tick();
int fake_cuda_current_uuid(unsigned char* uuid);
}
