// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that land on the first rank's device, each sender's by its way (landing_choice.hpp). What passes between a
// sender and the first rank, besides the bytes:
//
//  IPC:
//  1. The sender waits until its caller's work on the device is done (the CPU asks an event), and sends an offer: its
//     allocations, those that are gone by now, and its descriptor with places in them.
//  2. The first rank opens the allocations, takes memory on its own device, puts the copies into its stream, and
//  answers.
//     Where it cannot open them, it asks for staging: both go on as if that had been chosen.
//  3. The closing round tells the sender that the copies are done: until then its memory is looked at.
//  NCCL:
//  1. The sender sends its descriptor, and the number of its communicator (nccl_lists.hpp).
//  2. The first rank, when it has all, takes memory, and answers: the communicator's number, and an identity where it
//  is
//     a new one.
//  3. All meet where they have to; the senders send each tensor by itself, the first rank receives, batch by batch.
// Messages begin with the exchange's number: what a failed exchange has left behind is passed over.

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "src/core/descriptor.hpp"
#include "src/device/device_state.hpp"
#include "src/gather/route.hpp"

namespace muster::cuda {

struct Answer;

/// A sender's side.
class DeviceSending {
 public:
  DeviceSending(const gather::Call& call, DeviceState& state) : call_(call), state_(state) {}
  /// False: the first rank asks for staging.
  bool by_ipc();
  /// `members`: the first rank and all that go by NCCL, in the order of the list.
  void by_nccl(std::span<const int> members);

 private:
  void send_by_nccl(std::span<const Tensor* const> tensors, NcclLists::Entry& entry, const Answer& answer,
                    std::span<const int> members);
  const gather::Call& call_;
  DeviceState& state_;
};

/// The first rank's side.
class DeviceLanding {
 public:
  DeviceLanding(const gather::Call& call, DeviceState& state, int device)
      : call_(call), state_(state), device_(device) {}

  /// What the sender at this place of the list offers. False: it was asked for staging.
  bool take_ipc(std::size_t position, const gather::Record& record);
  void take_nccl(std::span<const std::size_t> positions, std::span<const gather::Record> records);
  /// Takes memory for what is staged: that it cannot be had must be told before the closing round.
  void reserve(std::size_t position, std::uint64_t bytes);
  /// Copies a staged tree to the device; it stays until finish().
  Config upload(std::size_t position, const Config& tree);
  /// A copy of the first rank's own.
  Config copy_of(const Config& tree);
  /// Returns when everything is there.
  void finish();
  /// What came by IPC and NCCL to its places among the entries.
  void deliver(std::vector<std::optional<Config>>& entries);

 private:
  struct Parcel {
    std::size_t position = 0;
    MemoryPool::Buffer buffer;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> places;  // offset and bytes of each tensor
    std::optional<Config> config;
  };
  [[nodiscard]] Tensor landed(DType dtype, const Shape& shape, const MemoryPool::Buffer& buffer, std::uint64_t offset,
                              std::uint64_t bytes) const;
  void receive_parcels(std::vector<Parcel>& parcels, Communicator& communicator, std::span<const int> senders);
  void begin();

  const gather::Call& call_;
  DeviceState& state_;
  int device_;
  bool has_begun_ = false;
  std::vector<Parcel> parcels_;
  std::vector<std::pair<std::size_t, MemoryPool::Buffer>> reserved_;  // by position
};

}  // namespace muster::cuda
