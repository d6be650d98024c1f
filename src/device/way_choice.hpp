// SPDX-License-Identifier: Apache-2.0
#pragma once
// How each sender's tensors get to the first rank, decided from what all ranks of the list have said: a pure function,
// the same on all of them. The table of docs/devices.md.

#include <cstdint>
#include <span>
#include <vector>

#include "muster/gather.hpp"
#include "src/gather/record.hpp"

namespace muster::cuda {

enum class Way : std::uint8_t {
  nothing,  ///< the rank has no tensors
  staging,  ///< through host memory: what the route without devices would do, from page-locked memory
  ipc,      ///< the first rank's device copies from the sender's (CUDA IPC)
  nccl,     ///< NCCL between devices
};
std::string_view way_name(Way way) noexcept;

/// What a rank knows of itself before round 1. Travels as Record::device.
struct DeviceFacts {
  std::uint64_t device : 48 = 0;  ///< device_identity() of the device that the tensors are on, or shall land on
  Way forced : 2 = Way::nothing;  ///< MUSTER_DEVICE_WAY; nothing: all ways are open
  Landing landing : 1 = Landing::host;
  bool is_known : 1 = false;  ///< false of a rank without tensors: it has not said anything
  bool has_tensors : 1 = false;
  bool sees_first : 1 = false;     ///< shares memory with the list's first rank, in another process
  bool is_exportable : 1 = false;  ///< contiguous, and in allocations that CUDA IPC can export
  bool is_contiguous : 1 = false;  ///< and on one device
  bool has_nccl : 1 = false;
  std::uint64_t unused : 7 = 0;
  friend bool operator==(const DeviceFacts&, const DeviceFacts&) = default;
};

void put_facts(const DeviceFacts& facts, gather::Record& record) noexcept;
DeviceFacts get_facts(const gather::Record& record) noexcept;

/// One way for each rank of the list, by position; the first rank's own is `nothing`. Where tensors land on the host,
/// all are staged. On a device: by IPC from ranks that the first one shares memory with; by NCCL from all others, where
/// each has a device of its own and NCCL is there on all; the rest is staged. Throws Error(rank_mismatch) where ranks
/// want different landings or force different ways, Error(unsupported) where a forced way cannot be.
std::vector<Way> choose_ways(std::span<const DeviceFacts> facts);

/// MUSTER_DEVICE_WAY: staging, ipc or nccl; `nothing` if it is not set. Throws Error(argument) on another value.
Way forced_way();

}  // namespace muster::cuda
