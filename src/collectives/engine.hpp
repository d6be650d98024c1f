// SPDX-License-Identifier: Apache-2.0
#pragma once
// Engine: the collectives of a ProcessGroup: what they check, agree about and make of bytes. Backends move them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "muster/config.hpp"
#include "muster/process_group.hpp"
#include "src/collectives/arguments.hpp"
#include "src/collectives/backend.hpp"
#include "src/sync/mail.hpp"

namespace muster::collectives {

inline WaitOptions waits(const CollectiveOptions& options, const char* phase) {
  return {.timeout = options.timeout, .stop = options.stop, .phase = phase};
}

class Engine {
 public:
  /// Around a wait of the group: if the group has failed at its end, what is under way on devices is aborted, because
  /// it would never end.
  class DeviceEnd {
   public:
    explicit DeviceEnd(const Engine& engine) : engine_(engine) {}
    ~DeviceEnd() {
      if (engine_.devices_ && engine_.group_->failure()) engine_.devices_->abort();
    }
    DeviceEnd& operator=(DeviceEnd&&) = delete;

   private:
    const Engine& engine_;
  };

  /// Collective over `group`, which is its own.
  Engine(std::shared_ptr<SyncGroup> group, const CollectiveOptions& options);

  [[nodiscard]] SyncGroup& group() const noexcept { return *group_; }
  [[nodiscard]] const Backend& backend() const noexcept { return *backend_; }
  [[nodiscard]] int rank() const noexcept { return group_->rank(); }
  [[nodiscard]] int size() const noexcept { return group_->size(); }
  /// Messages by tag: the backend's own and the program's.
  [[nodiscard]] sync::Mail& mail() noexcept { return sync::inside(*group_).mail(); }

  void barrier(const CollectiveOptions& options);
  /// In place of any collective call: this rank cannot make it. Throws `failure` on all ranks; the group remains
  /// usable.
  [[noreturn]] void refuse(const Error& failure);
  void wait_for_devices(const CollectiveOptions& options);
  /// Into `into`; if that is null, into a new tensor where the input is, which is returned.
  std::optional<Tensor> all_reduce(const What& what, const Tensor* into, const TensorView& tensor,
                                   const CollectiveOptions& options);
  Tensor all_reduce_shared(const What& what, const TensorView& tensor, const CollectiveOptions& options);
  Tensor all_gather_shared(What what, const TensorView& tensor, const CollectiveOptions& options);
  void broadcast(const What& what, const Tensor& tensor, const CollectiveOptions& options);
  /// The result is of no rank but `what.root`, if that is one. `what.slices`, if given: all ranks' extents.
  /// `into`, if given, has room for it: nothing is returned then.
  std::optional<Tensor> gather(What what, const TensorView& tensor, int dim, const CollectiveOptions& options,
                               const Tensor* into = nullptr);
  /// Likewise, into tensors of their own, one for each rank; on ranks that get nothing there are none.
  void gather_each(What what, std::span<const Tensor> outs, const TensorView& tensor, const CollectiveOptions& options);
  std::optional<Tensor> reduce_scatter(What what, const TensorView& tensor,
                                       std::optional<std::span<const std::int64_t>> sizes, int dim,
                                       const CollectiveOptions& options, const Tensor* into = nullptr);
  void scatter(const What& what, const Tensor& out, std::span<const TensorView> parts,
               const CollectiveOptions& options);
  Tensor all_to_all(const TensorView& tensor, std::optional<std::span<const std::int64_t>> rows,
                    std::vector<std::int64_t>* received, const CollectiveOptions& options,
                    const Tensor* into = nullptr);
  /// Of the ranks that give one: root alone (broadcast), or all, to all or to root.
  std::vector<Config> configs(const What& what, const Config& config, bool only_root_gives, bool only_root_gets,
                              const CollectiveOptions& options);
  /// A call that libmuster-cuda has itself, with tensors on several devices of each rank: `prepare` checks them, `move`
  /// is the call of Backend.
  void on_devices(const What& what, std::span<const Device> devices, const CollectiveOptions& options,
                  FunctionRef<void(DeviceBackend&)> prepare,
                  FunctionRef<void(DeviceBackend&, const Card&, const Opened&, const WaitOptions&)> move);

 private:
  struct Call;
  /// `where`: what devices the tensors are on; none: in host memory. `prepare` checks this rank's arguments and writes
  /// its card; `move` calls the backend.
  template <class Prepare, class Move>
  void run(const What& what, std::span<const Device> where, const CollectiveOptions& options, const Prepare& prepare,
           const Move& move);
  /// The one of the call.
  [[nodiscard]] Backend& mover() const noexcept { return device_ != nullptr ? *device_ : *backend_; }
  [[noreturn]] void disagree(const What& what, std::span<const Card> cards, const WaitOptions& options) const;
  void check_reducible(ReduceOp op, DType dtype) const;
  /// Rooms for all ranks' bytes, one behind the other.
  void place(const Tensor& all, std::span<const std::uint64_t> sizes);
  [[nodiscard]] std::size_t self() const noexcept { return static_cast<std::size_t>(rank()); }

  std::shared_ptr<SyncGroup> group_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<DeviceBackend> devices_;  // made by the first call with tensors on devices
  // Of the call.
  DeviceBackend* device_ = nullptr;  // if its tensors are on one
  Place place_;
  std::vector<Bytes> ins_;
  std::vector<Room> outs_;
  std::vector<std::int64_t> extents_;
  std::vector<std::uint64_t> sizes_;
  std::vector<std::uint64_t> bounds_;
};

}  // namespace muster::collectives
