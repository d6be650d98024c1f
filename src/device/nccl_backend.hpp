// SPDX-License-Identifier: Apache-2.0
#pragma once
// Collectives of a ProcessGroup for tensors on devices, by NCCL: what each call asks of it, and the memory that results
// and rearranged tensors take; and what calls have in common (nccl_calls.cpp).

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "src/base/function_ref.hpp"
#include "src/collectives/backend.hpp"
#include "src/device/copy_queue.hpp"
#include "src/device/nccl.hpp"

namespace muster::cuda {

using collectives::Bytes;
using collectives::Card;
using collectives::Opened;
using collectives::Room;

/// What every call of a group by NCCL does around NCCL's own:
///
///  1. begin(): this rank's devices, and the streams that its thread has named there (CudaStreamScope).
///  2. The round of the group's calls for host memory: all ranks hear what devices the others have, and whether all
///     agree. Nothing has moved if they do not.
///  3. If these devices have not met yet, they do: rank 0 makes NCCL's identity, and all wait for the meeting, with the
///     deadline.
///  4. NCCL's calls are put into the streams. The CPU waits until NCCL has taken them, with the deadline, and not until
///     the devices have done them.
/// Calls of a group come one after another on a device, whatever streams they are put into. What fails from 3 on is the
/// failure of the group. A group that has failed aborts its communicators: what is in a stream ends then, with whatever
/// bytes.
///
/// In a graph that is being captured there is no 3, and no memory is taken.
class NcclCalls {
 public:
  /// A device of the call.
  struct Lane {
    int device = 0;
    StreamHandle stream = nullptr;
  };

  NcclCalls(sync::Group& group, collectives::Backend& round) : group_(group), round_(round) {}
  /// Waits for what calls have put into streams, and for the others to end their calls, with deadlines.
  ~NcclCalls();
  NcclCalls& operator=(NcclCalls&&) = delete;

  /// 1. As DeviceBackend::begin().
  collectives::Place begin(std::span<const Device> devices);
  /// 2. Throws on all ranks or on none.
  void open(const Card& card, const Opened& opened, const WaitOptions& options);
  /// 3 and 4: `add` asks the communicator of each lane for what is to be done. NCCL's numbers are the ranks' times how
  /// many lanes each has, plus the lane's.
  using Add = FunctionRef<void(std::size_t lane, Communicator& communicator, StreamHandle stream)>;
  void put(const WaitOptions& options, const Add& add);

  // Of the call.
  [[nodiscard]] std::span<const Lane> lanes() const noexcept { return lanes_; }
  /// The one on this device. Throws Error(argument) if the call has none there.
  [[nodiscard]] const Lane& lane_of(const Device& device) const;
  [[nodiscard]] bool is_captured() const noexcept { return is_captured_; }
  /// Of all ranks.
  [[nodiscard]] std::span<const Card> cards() const noexcept { return cards_; }

  /// What is put into a lane's stream from now on comes behind the calls before, though they are in other streams.
  void follow(const Lane& lane);
  /// Something has been put there.
  void note_last(const Lane& lane);
  /// Until the devices have done what has been put.
  void wait(const WaitOptions& options);
  /// The group has failed.
  void abort() noexcept { met_.clear(); }

 private:
  using Communicators = std::vector<std::unique_ptr<Communicator>>;  // by lane
  [[nodiscard]] std::uint64_t identity_of(int device);
  [[nodiscard]] std::vector<int> others() const;
  /// What devices each rank has.
  [[nodiscard]] std::vector<std::uint64_t> devices_of_all() const;
  /// Their communicators; null if they have not met.
  [[nodiscard]] Communicators* met();
  Communicators& meet(const WaitOptions& options);
  [[nodiscard]] bool are_ready() const;
  [[nodiscard]] bool have_ended() const;
  void wait_until_ready(const Communicators& communicators, const char* what, const WaitOptions& options);
  /// Whether it could: all have ended in order.
  [[nodiscard]] bool try_close();

  sync::Group& group_;
  collectives::Backend& round_;
  std::map<int, std::uint64_t> identities_;  // by device
  std::map<int, Event> last_;                // behind the latest call on a device
  std::map<std::vector<std::uint64_t>, Communicators> met_;
  std::vector<Lane> lanes_;
  bool is_captured_ = false;
  std::vector<Card> cards_;
};

/// Throws Error(unsupported) if NCCL has no such reduction.
NcclReduction nccl_reduction(merge::Combine combine, DType dtype);

class NcclBackend final : public collectives::DeviceBackend {
 public:
  NcclBackend(sync::Group& group, collectives::Backend& round) : group_(group), calls_(group, round) {}

  [[nodiscard]] std::string_view name() const noexcept override { return "NCCL"; }
  collectives::Place begin(std::span<const Device> devices) override { return calls_.begin(devices); }
  [[nodiscard]] Bytes bytes_of(const TensorView& tensor) const override;
  void check_reducible(merge::Combine combine, DType dtype) const override { (void)nccl_reduction(combine, dtype); }
  void check_can_allocate() const override;
  [[nodiscard]] Tensor allocate(DType dtype, Shape shape) override;
  [[nodiscard]] Tensor cut(const TensorView& tensor, std::size_t dim, std::span<const std::int64_t> extents) override;
  [[nodiscard]] Tensor join(const Tensor& parts, std::span<const std::uint64_t> sizes, std::uint64_t rows) override;
  void wait(const WaitOptions& options) override { calls_.wait(options); }
  void abort() noexcept override { calls_.abort(); }

  void all_reduce(const Card& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in, Room out,
                  const WaitOptions& options) override;
  void reduce_scatter(const Card& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                      std::span<const std::uint64_t> bounds, Room out, const WaitOptions& options) override;
  void all_gather(const Card& card, const Opened& opened, Bytes in, std::span<const Room> outs,
                  const WaitOptions& options) override;
  void all_to_all(const Card& card, const Opened& opened, std::span<const Bytes> ins, std::span<const Room> outs,
                  const WaitOptions& options) override;

  /// For calls that Backend has not.
  [[nodiscard]] NcclCalls& calls() noexcept { return calls_; }

 private:
  [[nodiscard]] std::size_t self() const noexcept { return static_cast<std::size_t>(group_.rank()); }

  sync::Group& group_;
  NcclCalls calls_;
};

}  // namespace muster::cuda
