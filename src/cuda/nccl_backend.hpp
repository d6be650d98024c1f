// SPDX-License-Identifier: Apache-2.0
#pragma once
// NcclBackend: collectives of a ProcessGroup for tensors on devices, by NCCL. It implements the individual calls, and
// allocates memory for results and rearranged tensors. NcclCalls implements the steps that all calls share.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "src/base/function_ref.hpp"
#include "src/collectives/backend.hpp"
#include "src/cuda/copy_queue.hpp"
#include "src/cuda/nccl.hpp"

namespace muster::cuda {

using collectives::Bytes;
using collectives::CallSummary;
using collectives::Opened;
using collectives::Room;

/// The steps that are common to all NCCL calls of a group:
///
///  1. begin(): determines the devices of this rank, and the streams that its thread has named for them
///     (CudaStreamScope).
///  2. open(): the round that the group also uses for host memory. All ranks receive the devices of the others, and
///     check that all agree. If they do not, no data has been transferred.
///  3. If these devices are not connected yet, rank 0 makes the NCCL ID, and all ranks wait for the connection, with
///     the deadline.
///  4. The NCCL calls are put into the streams. The CPU waits, with the deadline, until NCCL has accepted them. It does
///     not wait until the devices have completed them.
/// Calls of a group are executed one after another on a device, even if they are in different streams. An error from
/// step 3 on fails the group. A group that has failed aborts its communicators. The work in the streams then ends, and
/// its results are unspecified.
///
/// In a graph that is being captured, step 3 is not possible, and no memory is allocated.
class NcclCalls {
 public:
  /// A device of the call.
  struct DeviceCall {
    int device = 0;
    StreamHandle stream = nullptr;
  };

  NcclCalls(group::BaseGroup& group, collectives::Backend& round) : group_(group), round_(round) {}
  /// Waits, with deadlines, for the work that calls have put into streams, and for the other ranks to end their calls.
  ~NcclCalls();
  NcclCalls& operator=(NcclCalls&&) = delete;

  /// Step 1. As DeviceBackend::begin().
  collectives::CallDevices begin(std::span<const Device> devices);
  /// Step 2. Throws on all ranks or on none.
  void open(const CallSummary& card, const Opened& opened, const WaitOptions& options);
  /// Steps 3 and 4: `add` calls the communicator of each lane. The NCCL rank of a lane is the rank times the number of
  /// lanes per rank, plus the index of the lane.
  using Add = FunctionRef<void(std::size_t lane, Communicator& communicator, StreamHandle stream)>;
  void put(const WaitOptions& options, const Add& add);

  // The state of the current call.
  [[nodiscard]] std::span<const DeviceCall> lanes() const noexcept { return lanes_; }
  /// Returns the lane on this device. Throws Error(invalid_argument) if the call has none there.
  [[nodiscard]] const DeviceCall& lane_of(const Device& device) const;
  [[nodiscard]] bool is_captured() const noexcept { return is_captured_; }
  /// Returns the cards of all ranks.
  [[nodiscard]] std::span<const CallSummary> cards() const noexcept { return cards_; }

  /// Makes later work in the lane's stream wait for the earlier calls, which may be in other streams.
  void follow(const DeviceCall& lane);
  /// Called after work was put into the lane's stream.
  void note_last(const DeviceCall& lane);
  /// Waits until the devices have completed all work.
  void wait(const WaitOptions& options);
  /// Called when the group has failed.
  void abort() noexcept { met_.clear(); }

 private:
  using Communicators = std::vector<std::unique_ptr<Communicator>>;  // by lane
  [[nodiscard]] std::uint64_t identity_of(int device);
  [[nodiscard]] std::vector<int> others() const;
  /// Returns the devices of each rank.
  [[nodiscard]] std::vector<std::uint64_t> devices_of_all() const;
  /// Returns the communicators of these devices, or null if they are not connected.
  [[nodiscard]] Communicators* met();
  Communicators& meet(const WaitOptions& options);
  [[nodiscard]] bool are_ready() const;
  [[nodiscard]] bool have_ended() const;
  void wait_until_ready(const Communicators& communicators, const char* what, const WaitOptions& options);
  /// Returns whether all ranks have ended in order.
  [[nodiscard]] bool try_close();

  group::BaseGroup& group_;
  collectives::Backend& round_;
  std::map<int, std::uint64_t> identities_;  // by device
  std::map<int, Event> last_;                // recorded after the latest call on a device
  std::map<std::vector<std::uint64_t>, Communicators> met_;
  std::vector<DeviceCall> lanes_;
  bool is_captured_ = false;
  std::vector<CallSummary> cards_;
};

/// Throws Error(unsupported) if NCCL has no such reduction.
NcclReduction nccl_reduction(merge::Combine combine, DType dtype);

class NcclBackend final : public collectives::DeviceBackend {
 public:
  NcclBackend(group::BaseGroup& group, collectives::Backend& round) : group_(group), calls_(group, round) {}

  [[nodiscard]] std::string_view name() const noexcept override { return "NCCL"; }
  collectives::CallDevices begin(std::span<const Device> devices) override { return calls_.begin(devices); }
  [[nodiscard]] Bytes bytes_of(const TensorView& tensor) const override;
  void check_reducible(merge::Combine combine, DType dtype) const override { (void)nccl_reduction(combine, dtype); }
  void check_can_allocate() const override;
  [[nodiscard]] Tensor allocate(DType dtype, Shape shape) override;
  [[nodiscard]] Tensor cut(const TensorView& tensor, std::size_t dim, std::span<const std::int64_t> extents) override;
  [[nodiscard]] Tensor join(const Tensor& parts, std::span<const std::uint64_t> sizes, std::uint64_t rows) override;
  void wait(const WaitOptions& options) override { calls_.wait(options); }
  void abort() noexcept override { calls_.abort(); }

  void all_reduce(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                  Room out, const WaitOptions& options) override;
  void reduce_scatter(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                      std::span<const std::uint64_t> bounds, Room out, const WaitOptions& options) override;
  void all_gather(const CallSummary& card, const Opened& opened, Bytes in, std::span<const Room> outs,
                  const WaitOptions& options) override;
  void all_to_all(const CallSummary& card, const Opened& opened, std::span<const Bytes> ins, std::span<const Room> outs,
                  const WaitOptions& options) override;

  /// For calls that Backend does not have.
  [[nodiscard]] NcclCalls& calls() noexcept { return calls_; }

 private:
  [[nodiscard]] std::size_t self() const noexcept { return static_cast<std::size_t>(group_.rank()); }

  group::BaseGroup& group_;
  NcclCalls calls_;
};

}  // namespace muster::cuda
