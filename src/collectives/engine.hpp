// SPDX-License-Identifier: Apache-2.0
#pragma once
// Engine: the collectives of a ProcessGroup. It checks arguments, makes all ranks agree on the call, and converts
// between tensors and bytes. Backends transfer the bytes.

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
#include "src/group/mail.hpp"

namespace muster::collectives {

inline WaitOptions waits(const CollectiveOptions& options, const char* phase) {
  return {.timeout = options.timeout, .stop = options.stop, .phase = phase};
}

class Engine {
 public:
  /// Guards a wait of the group. If the group has failed at the end of the wait, aborts the work on devices, which
  /// would never end.
  class DeviceEnd {
   public:
    explicit DeviceEnd(const Engine& engine) : engine_(engine) {}
    ~DeviceEnd() {
      if (engine_.devices_ && engine_.group_->error()) engine_.devices_->abort();
    }
    DeviceEnd& operator=(DeviceEnd&&) = delete;

   private:
    const Engine& engine_;
  };

  /// Collective over `group`, which the engine then owns.
  Engine(std::shared_ptr<Group> group, const CollectiveOptions& options);

  [[nodiscard]] Group& group() const noexcept { return *group_; }
  [[nodiscard]] const Backend& backend() const noexcept { return *backend_; }
  [[nodiscard]] int rank() const noexcept { return group_->rank(); }
  [[nodiscard]] int size() const noexcept { return group_->size(); }
  /// Returns the messages by tag: those of the backend and those of the program.
  [[nodiscard]] group::Mail& mail() noexcept { return group::inside(*group_).mail(); }

  void barrier(const CollectiveOptions& options);
  /// Called instead of a collective call that this rank cannot make. Throws `failure` on all ranks; the group remains
  /// usable.
  [[noreturn]] void refuse(const Error& failure);
  void wait_for_devices(const CollectiveOptions& options);
  /// Writes the result to `into`. If `into` is null, returns a new tensor on the device of the input.
  std::optional<Tensor> all_reduce(const What& what, const Tensor* into, const TensorView& tensor,
                                   const CollectiveOptions& options);
  Tensor all_reduce_shared(const What& what, const TensorView& tensor, const CollectiveOptions& options);
  Tensor all_gather_shared(What what, const TensorView& tensor, const CollectiveOptions& options);
  void broadcast(const What& what, const Tensor& tensor, const CollectiveOptions& options);
  /// Only `what.root` has a result, if it is set; otherwise all ranks have one. `what.slices`, if given, contains the
  /// extents of all ranks. If `into` is given, the result is written there and nothing is returned.
  std::optional<Tensor> gather(What what, const TensorView& tensor, int dim, const CollectiveOptions& options,
                               const Tensor* into = nullptr);
  /// Gathers into separate tensors, one per rank. On ranks without a result `outs` is empty.
  void gather_each(What what, std::span<const Tensor> outs, const TensorView& tensor, const CollectiveOptions& options);
  std::optional<Tensor> reduce_scatter(What what, const TensorView& tensor,
                                       std::optional<std::span<const std::int64_t>> sizes, int dim,
                                       const CollectiveOptions& options, const Tensor* into = nullptr);
  void scatter(const What& what, const Tensor& out, std::span<const TensorView> parts,
               const CollectiveOptions& options);
  Tensor all_to_all(const TensorView& tensor, std::optional<std::span<const std::int64_t>> rows,
                    std::vector<std::int64_t>* received, const CollectiveOptions& options,
                    const Tensor* into = nullptr);
  /// Returns the Configs of the ranks that send one: only the root (broadcast), or all ranks. The receivers are all
  /// ranks, or only the root.
  std::vector<Config> configs(const What& what, const Config& config, bool only_root_gives, bool only_root_gets,
                              const CollectiveOptions& options);
  /// Runs a call of libmuster-cuda with tensors on several devices of each rank. `prepare` checks them, and `move`
  /// calls the Backend.
  void on_devices(const What& what, std::span<const Device> devices, const CollectiveOptions& options,
                  FunctionRef<void(DeviceBackend&)> prepare,
                  FunctionRef<void(DeviceBackend&, const CallSummary&, const Opened&, const WaitOptions&)> move);

 private:
  struct Call;
  /// `where` contains the devices of the tensors; it is empty for host memory. `prepare` checks this rank's arguments
  /// and writes its card. `move` calls the backend.
  template <class Prepare, class Move>
  void run(const What& what, std::span<const Device> where, const CollectiveOptions& options, const Prepare& prepare,
           const Move& move);
  /// Returns the backend of the current call.
  [[nodiscard]] Backend& mover() const noexcept { return device_ != nullptr ? *device_ : *backend_; }
  [[noreturn]] void disagree(const What& what, std::span<const CallSummary> cards, const WaitOptions& options) const;
  void check_reducible(ReduceOp op, DType dtype) const;
  /// Sets the buffers for the data of all ranks, one after another.
  void place(const Tensor& all, std::span<const std::uint64_t> sizes);
  [[nodiscard]] std::size_t self() const noexcept { return static_cast<std::size_t>(rank()); }

  std::shared_ptr<Group> group_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<DeviceBackend> devices_;  // made by the first call with tensors on devices
  // The state of the current call.
  DeviceBackend* device_ = nullptr;  // set if its tensors are on a device
  CallDevices place_;
  std::vector<Bytes> ins_;
  std::vector<Room> outs_;
  std::vector<std::int64_t> extents_;
  std::vector<std::uint64_t> sizes_;
  std::vector<std::uint64_t> bounds_;
};

}  // namespace muster::collectives
