// SPDX-License-Identifier: Apache-2.0
#pragma once
// Chooses how the tensors of each sender reach the root. This is a pure function of the data that all ranks of the list
// have published, so all of them get the same result. The rules are in the table of docs/reference/gpu.md.

#include <cstdint>
#include <span>
#include <vector>

#include "muster/gather.hpp"
#include "src/gather/record.hpp"

namespace muster::cuda {

enum class TransferMethod : std::uint8_t {
  nothing,  ///< the rank has no tensors
  staging,  ///< through page-locked host memory, by the route that is used without devices
  ipc,      ///< the root's device copies from the sender's device (CUDA IPC)
  nccl,     ///< NCCL between devices
};
std::string_view way_name(TransferMethod way) noexcept;

/// The facts that a rank knows about itself before round 1. Sent as ExchangeRecord::device.
struct DeviceFacts {
  /// The device_identity() of the device on which the tensors are, or to which they must be copied.
  std::uint64_t device : 48 = 0;
  TransferMethod forced : 2 = TransferMethod::nothing;  ///< MUSTER_DEVICE_TRANSPORT; `nothing` if it is not set
  Destination destination : 1 = Destination::host;
  bool is_known : 1 = false;  ///< false for a rank without tensors, which has no facts
  bool has_tensors : 1 = false;
  bool sees_first : 1 = false;     ///< shares memory with the root of the list, which is another process
  bool is_exportable : 1 = false;  ///< contiguous, and in allocations that CUDA IPC can export
  bool is_contiguous : 1 = false;  ///< contiguous, and on one device
  bool has_nccl : 1 = false;
  std::uint64_t unused : 7 = 0;
  friend bool operator==(const DeviceFacts&, const DeviceFacts&) = default;
};

void put_facts(const DeviceFacts& facts, gather::ExchangeRecord& record) noexcept;
DeviceFacts get_facts(const gather::ExchangeRecord& record) noexcept;

/// Returns one method per rank of the list, by position; the root itself has `nothing`. If the destination is host
/// memory, all senders are staged. If it is a device:
///  - A rank that shares memory with the root uses IPC if its tensors can be exported.
///  - Ranks that do not share memory with the root use NCCL if each has its own device and NCCL is available on all.
///  - All other ranks are staged.
/// A forced method replaces this choice. Throws Error(rank_mismatch) if ranks want different destinations or force
/// different methods, and Error(unsupported) if a forced method is not possible.
std::vector<TransferMethod> choose_ways(std::span<const DeviceFacts> facts);

/// Returns the value of MUSTER_DEVICE_TRANSPORT: staging, ipc or nccl; `nothing` if it is not set. Throws
/// Error(invalid_argument) for any other value.
TransferMethod forced_way();

}  // namespace muster::cuda
