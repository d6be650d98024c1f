// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors that are sent to the root's device, by one method per sender (transfer_method.hpp). In addition to the data,
// a sender and the root exchange these messages:
//
//  IPC:
//  1. The sender waits until the work of its caller on the device is complete (the CPU queries an event). It then sends
//     an offer: its allocations, the allocations that it has freed, and its descriptor with places in the allocations.
//  2. The root opens the allocations, allocates memory on its own device, queues the copies in its stream, and answers.
//     If it cannot open them, it asks for staging, and both continue as if staging had been chosen.
//  3. The closing round confirms to the sender that the copies are complete. Until then the root reads its memory.
//  NCCL:
//  1. The sender sends its descriptor, and the number of its communicator (nccl.hpp).
//  2. When the root has all of them, it allocates memory and answers with the number of the communicator. For a new
//     communicator the answer also contains its NCCL ID.
//  3. All ranks without that communicator create it. The senders send one tensor after another, and the root receives
//     them, batch by batch.
// Each message begins with the number of the exchange. Messages of an earlier exchange that failed are skipped.

#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "muster/error.hpp"
#include "src/core/descriptor.hpp"
#include "src/cuda/device_state.hpp"
#include "src/gather/route.hpp"
#include "src/gather/shm_route.hpp"

namespace muster::cuda {

inline constexpr std::uint32_t most_exports = 65536;
/// The number of tensors per sender in one NCCL batch. Both sides must use the same number.
inline constexpr std::size_t nccl_batch = 512;

/// The sender's offer. `exports` Export records, `gone` buffer numbers and the descriptor follow.
struct OfferHeader {
  std::uint64_t exchange = 0;
  std::uint64_t body_bytes = 0;
  std::uint64_t body_hash = 0;
  std::uint32_t exports = 0;
  std::uint32_t gone = 0;
  std::uint32_t communicator = 0;  // for NCCL
  std::uint32_t has_failed = 0;    // no data follows; round 2 gives the reason
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

/// Reads values from the front of a message. Throws Error(corrupt) if it is too short.
class MessageReader {
 public:
  explicit MessageReader(std::span<const std::byte> message) : left_(message) {}
  template <class T>
  T take() {
    if (left_.size() < sizeof(T)) throw Error(ErrorKind::corrupt, "malformed message of a rank: too short");
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

/// The sender's side.
class DeviceSending {
 public:
  DeviceSending(const gather::GatherCall& call, DeviceState& state) : call_(call), state_(state) {}
  /// Returns false if the root asks for staging.
  bool by_ipc();
  /// `members` contains the root and all senders that use NCCL, in the order of the rank list.
  void by_nccl(std::span<const int> members);

 private:
  void send_by_nccl(std::span<const Tensor* const> tensors, NcclLists::NcclEntry& entry, const Answer& answer,
                    std::span<const int> members);
  const gather::GatherCall& call_;
  DeviceState& state_;
};

/// The root's side.
class DeviceDestination {
 public:
  DeviceDestination(const gather::GatherCall& call, DeviceState& state, int device)
      : call_(call), state_(state), device_(device) {}

  /// Takes the offer of the sender at this position of the list. Returns false if the sender was asked for staging.
  bool take_ipc(std::size_t position, const gather::ExchangeRecord& record);
  void take_nccl(std::span<const std::size_t> positions, const gather::Records& records);
  /// Allocates memory for staged tensors. A lack of memory must be reported before the closing round.
  void reserve(std::size_t position, std::uint64_t bytes);
  /// Copies a staged tree to the device. The tree must exist until finish().
  Config upload(std::size_t position, const Config& tree);
  /// Returns a copy of the root's own tree.
  Config copy_of(const Config& tree);
  /// Waits until all tensors have arrived.
  void finish();
  /// Moves the trees that arrived by IPC and NCCL to their positions in `entries`.
  void deliver(std::vector<std::optional<Config>>& entries);

 private:
  struct DeviceTree {
    std::size_t position = 0;
    std::vector<std::pair<DevicePointer, std::uint64_t>> places;  // for NCCL: the address and size of each tensor
    std::optional<Config> config;                                 // keeps the memory
  };
  /// Fetches a tensor that has elements from its place at the sender to an address of this device.
  using TakeIn = std::function<void(core::TensorLocation place, DevicePointer to, std::uint64_t bytes)>;
  /// Allocates memory for a tree, and assembles it there.
  DeviceTree take_in(std::size_t position, const gather::ExchangeRecord& record, std::span<const std::byte> descriptor,
                     const TakeIn& take);
  [[nodiscard]] Tensor tensor_at(DType dtype, const Shape& shape, const MemoryPool::Buffer& buffer,
                                 std::uint64_t offset, std::uint64_t bytes) const;
  void receive_trees(std::vector<DeviceTree>& trees, Communicator& communicator, std::span<const int> senders);
  void begin();

  const gather::GatherCall& call_;
  DeviceState& state_;
  int device_;
  bool has_begun_ = false;
  std::vector<DeviceTree> trees_;
  std::vector<std::pair<std::size_t, MemoryPool::Buffer>> reserved_;  // by position
};

}  // namespace muster::cuda
