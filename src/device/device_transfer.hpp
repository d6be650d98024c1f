// SPDX-License-Identifier: Apache-2.0
#pragma once
// An exchange of tensors that are on devices. The route without devices that these ranks would take (shared memory,
// MPI, a workspace) is underneath: it carries the trees, and the bytes of whatever is staged.
//
//  1. offer: as the route underneath, and what decides how tensors reach the first rank's device (landing_choice.hpp).
//  2. The first rank takes offers by IPC and NCCL, then lets the route underneath take the rest. Senders do what the
//     ways say; who is staged copies to the host first: into the slot of shared memory itself where it shares memory
//     with the first rank, else into page-locked memory that the route underneath sends on.
//  3. The first rank's own tensors are copied to where the others' land, beside all that.

#include <memory>
#include <optional>
#include <vector>

#include "src/device/landing.hpp"
#include "src/device/landing_choice.hpp"
#include "src/device/staging.hpp"
#include "src/gather/route.hpp"

namespace muster::cuda {

/// What carries host tensors between the ranks of this call; null where nothing does.
const gather::RouteDriver* route_underneath(const gather::Call& call);

class DeviceTransfer final : public gather::Transfer {
 public:
  explicit DeviceTransfer(const gather::Call& call);
  ~DeviceTransfer() override;
  DeviceTransfer(const DeviceTransfer&) = delete;
  DeviceTransfer& operator=(const DeviceTransfer&) = delete;

  void offer(gather::Record& record) override;
  void move(std::span<const gather::Record> records, ExchangeReport& report) override;
  void commit() noexcept override;
  std::vector<std::optional<Config>> deliver() override;
  std::vector<std::unique_ptr<gather::Obligation>> obligations() override { return inner_->obligations(); }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override;

 private:
  [[nodiscard]] DeviceFacts own_facts() const;
  /// By CUDA IPC: tried, because not all machines that say so can.
  [[nodiscard]] bool can_be_exported(const TensorView& tensor) const;
  void send(Way way, std::span<const Way> ways, std::span<const gather::Record> records, ExchangeReport& report);
  void receive(std::span<const Way> ways, std::span<const gather::Record> records, ExchangeReport& report);
  void stage(std::span<const gather::Record> records, ExchangeReport& report);
  /// Of a sender that shares no memory with the first rank.
  void copy_to_host();
  [[nodiscard]] std::vector<int> nccl_members(std::span<const Way> ways) const;
  [[nodiscard]] bool lands_on_device() const { return call_.options->landing == Landing::device; }

  const gather::Call& call_;
  std::shared_ptr<DeviceState> state_;
  DeviceSlotFiller filler_;
  gather::Call inner_call_;
  std::optional<HostCopy> staged_;  // of a sender that shares no memory with the first rank, and of the first rank
  std::unique_ptr<gather::Transfer> inner_;
  std::optional<DeviceLanding> landing_;
  std::optional<Config> own_;  // the first rank's, where it lands
  std::string manner_;
  bool has_device_tensors_ = false;
  bool is_committed_ = false;
};

std::unique_ptr<gather::RouteDriver> make_device_route();

}  // namespace muster::cuda
