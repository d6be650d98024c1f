// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that go to the first rank's device, each sender's by its way (way_choice.hpp). What passes between a
// sender and the first rank, besides the bytes:
//
//  IPC:
//  1. The sender waits until its caller's work on the device is done (the CPU asks an event), and sends an offer: its
//     allocations, those that are gone by now, and its descriptor with places in them.
//  2. The first rank opens the allocations, takes memory on its own device, puts the copies into its stream, and
//     answers. Where it cannot open them, it asks for staging: both go on as if that had been chosen.
//  3. The closing round tells the sender that the copies are done: until then its memory is looked at.
//  NCCL:
//  1. The sender sends its descriptor, and the number of its communicator (nccl.hpp).
//  2. The first rank, when it has all, takes memory, and answers: the communicator's number, and an identity where it
//     is a new one.
//  3. All meet where they have to; the senders send each tensor by itself, the first rank receives, batch by batch.
// Messages begin with the exchange's number: what a failed exchange has left behind is passed over.

#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "muster/error.hpp"
#include "src/core/descriptor.hpp"
#include "src/device/device_state.hpp"
#include "src/gather/route.hpp"
#include "src/gather/shm_protocol.hpp"

namespace muster::cuda {

inline constexpr std::uint32_t most_exports = 65536;
/// Tensors of one sender in a batch of NCCL: the same on both sides.
inline constexpr std::size_t nccl_batch = 512;

/// From the sender; `exports` times Export, `gone` times a buffer's number, and the descriptor follow.
struct OfferHeader {
  std::uint64_t exchange = 0;
  std::uint64_t body_bytes = 0;
  std::uint64_t body_hash = 0;
  std::uint32_t exports = 0;
  std::uint32_t gone = 0;
  std::uint32_t communicator = 0;  // of NCCL
  std::uint32_t has_failed = 0;    // nothing follows: round 2 says why
};

enum class Verdict : std::uint32_t { failed, taken, stage };

struct Answer {
  std::uint64_t exchange = 0;
  Verdict verdict = Verdict::failed;
  std::uint32_t communicator = 0;
  std::uint32_t is_new = 0;
  std::int32_t size = 0;
  std::int32_t rank = 0;
  NcclId id{};
};

/// Cuts values off the front of a message. Throws Error(corrupt) where it is too short.
class MessageReader {
 public:
  explicit MessageReader(std::span<const std::byte> message) : left_(message) {}
  template <class T>
  T take() {
    if (left_.size() < sizeof(T)) throw Error(ErrorKind::corrupt, "a message of a rank is too short");
    T value;
    std::memcpy(&value, left_.data(), sizeof value);
    left_ = left_.subspan(sizeof value);
    return value;
  }
  [[nodiscard]] std::span<const std::byte> rest() const noexcept { return left_; }

 private:
  std::span<const std::byte> left_;
};

using gather::append;
using gather::receive_of;

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
class DeviceDestination {
 public:
  DeviceDestination(const gather::Call& call, DeviceState& state, int device)
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
  struct IncomingTree {
    std::size_t position = 0;
    std::vector<std::pair<DevicePointer, std::uint64_t>> places;  // by NCCL: where each tensor goes, and its bytes
    std::optional<Config> config;                                 // keeps the memory
  };
  /// Brings a tensor that has elements: from its place, as the sender says it, to that address.
  using TakeIn = std::function<void(core::Place place, DevicePointer to, std::uint64_t bytes)>;
  /// Takes memory for a tree, and puts it together there.
  IncomingTree take_in(std::size_t position, const gather::Record& record, std::span<const std::byte> descriptor,
                       const TakeIn& take);
  [[nodiscard]] Tensor tensor_at(DType dtype, const Shape& shape, const MemoryPool::Buffer& buffer,
                                 std::uint64_t offset, std::uint64_t bytes) const;
  void receive_trees(std::vector<IncomingTree>& trees, Communicator& communicator, std::span<const int> senders);
  void begin();

  const gather::Call& call_;
  DeviceState& state_;
  int device_;
  bool has_begun_ = false;
  std::vector<IncomingTree> trees_;
  std::vector<std::pair<std::size_t, MemoryPool::Buffer>> reserved_;  // by position
};

}  // namespace muster::cuda
