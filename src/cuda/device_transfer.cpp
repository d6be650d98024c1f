// SPDX-License-Identifier: Apache-2.0
// An exchange of tensors on devices. It uses the route that these ranks would use without devices (shared memory, MPI,
// a workspace). That inner route transfers the trees and the bytes of all staged tensors.
//
//  1. offer: as the inner route. The record also contains the facts that decide how tensors reach the root's device
//     (transfer_method.hpp).
//  2. The root receives offers by IPC and NCCL, then lets the inner route receive the rest. Each sender uses the method
//     that was chosen for it. A staged sender first copies to the host. If it shares memory with the root, it copies
//     into the slot of shared memory; otherwise into page-locked memory, which the inner route sends.
//  3. Meanwhile the root copies its own tensors to the destination of the others.

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "muster/log.hpp"
#include "src/cuda/destination.hpp"
#include "src/cuda/staging.hpp"
#include "src/cuda/transfer_method.hpp"
#include "src/gather/opening.hpp"
#include "src/gather/route.hpp"

namespace muster::cuda {
namespace {

using gather::ExchangeRecord;
using gather::GatherCall;

bool shares_memory_with_first(const GatherCall& call) {
  return call.group->region_of(call.first()) != nullptr;
}

/// Returns the route for host tensors between the ranks of this call, or null if there is none.
const gather::RouteDriver* route_underneath(const GatherCall& call) {
  for (const Route route : {Route::local, Route::shm, Route::mpi, Route::tcp, Route::workspace}) {
    const gather::RouteDriver* driver = gather::RouteTable::instance().find(route);
    if (driver != nullptr && driver->is_usable(call)) return driver;
  }
  return nullptr;
}

class DeviceTransfer final : public gather::Transfer {
 public:
  explicit DeviceTransfer(const GatherCall& call);
  ~DeviceTransfer() override;
  DeviceTransfer& operator=(DeviceTransfer&&) = delete;

  void offer(ExchangeRecord& record) override;
  void move(const gather::Records& records, ExchangeReport& report) override;
  void commit() noexcept override;
  std::vector<std::optional<Config>> deliver() override;
  std::vector<std::unique_ptr<gather::OutstandingLease>> obligations() override { return inner_->obligations(); }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override;

 private:
  [[nodiscard]] DeviceFacts own_facts() const;
  /// Returns whether the tensor can be exported by CUDA IPC. It is tried, because some machines report the ability
  /// without having it.
  [[nodiscard]] bool can_be_exported(const TensorView& tensor) const;
  void send(TransferMethod way, std::span<const TransferMethod> ways, const gather::Records& records,
            ExchangeReport& report);
  void receive(std::span<const TransferMethod> ways, const gather::Records& records, ExchangeReport& report);
  void stage(const gather::Records& records, ExchangeReport& report);
  /// Used by a sender that shares no memory with the root.
  void copy_to_host();
  [[nodiscard]] std::vector<int> nccl_members(std::span<const TransferMethod> ways) const;
  [[nodiscard]] bool lands_on_device() const { return call_.options->devices.destination == Destination::device; }

  const GatherCall& call_;
  std::shared_ptr<DeviceState> state_;
  DeviceSlotFiller filler_;
  GatherCall inner_call_;           // for host tensors
  std::optional<HostCopy> staged_;  // of the root, or of a sender that shares no memory with it
  std::unique_ptr<gather::Transfer> inner_;
  std::optional<DeviceDestination> destination_;
  std::optional<Config> own_;  // the root's own tree at its destination
  std::string manner_;
  bool has_device_tensors_ = false;
  bool is_committed_ = false;
};

DeviceTransfer::DeviceTransfer(const GatherCall& call)
    : call_(call), state_(device_state_of(*call.group)), filler_(call, *state_), inner_call_(call) {
  const gather::RouteDriver* driver = route_underneath(call_);
  if (driver == nullptr) throw Error(ErrorKind::unsupported, "no route reaches all ranks of the list");
  if (call_.value != nullptr) {
    check_places(*call_.value);
    visit_device_tensors(*call_.value, [&](const Tensor&) { has_device_tensors_ = true; });
  }
  if (has_device_tensors_ && call_.is_sender()) {
    visit_device_tensors(*call_.value, [](const Tensor& tensor) { (void)require_pitched(tensor.view()); });
    if (driver->route() != Route::workspace && shares_memory_with_first(call_))
      inner_call_.filler = &filler_;
    else
      inner_call_.stage = [this] { copy_to_host(); };
  }
  // Members whose tensors NCCL or CUDA IPC moves do not move inner_.
  inner_call_.all_move = false;
  inner_ = driver->begin(inner_call_);
}

DeviceTransfer::~DeviceTransfer() {
  if (!is_committed_) state_->drop_queues();
}

bool DeviceTransfer::can_be_exported(const TensorView& tensor) const {
  try {
    (void)state_->exports.find(tensor);
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::io) throw;
    log(LogLevel::info,
        fmt::format("rank {}: the data that it sends is staged: {}", call_.group->rank(), error.what()));
    return false;
  }
}

DeviceFacts DeviceTransfer::own_facts() const {
  DeviceFacts facts;
  facts.is_known = true;
  facts.destination = call_.options->devices.destination;
  facts.has_tensors = has_device_tensors_;
  facts.forced = forced_way();
  if (!lands_on_device()) return facts;
  facts.sees_first = call_.is_sender() && shares_memory_with_first(call_) &&
                     call_.group->info(call_.group->rank()).pid != call_.group->info(call_.first()).pid;
  facts.has_nccl = find_nccl() != nullptr;
  facts.is_exportable = facts.is_contiguous = true;
  std::optional<int> device;
  visit_device_tensors(*call_.value, [&](const Tensor& tensor) {
    const auto located = locate(tensor.data());
    facts.is_exportable = facts.is_exportable && tensor.view().is_contiguous() && located && located->is_exportable &&
                          (!facts.sees_first || can_be_exported(tensor.view()));
    facts.is_contiguous = facts.is_contiguous && tensor.view().is_contiguous() &&
                          device.value_or(tensor.device().index) == tensor.device().index;
    device = tensor.device().index;
  });
  if (device) facts.device = device_identity(*device);
  return facts;
}

void DeviceTransfer::offer(ExchangeRecord& record) {
  inner_->offer(record);
  if (!has_device_tensors_) return;
  const DeviceFacts facts = own_facts();
  put_facts(facts, record);
  record.closes = true;
  // In the first exchange shared memory is counted, because the tensors may have to be staged after all.
  if (lands_on_device() && facts.sees_first && facts.is_exportable &&
      (facts.forced == TransferMethod::nothing || facts.forced == TransferMethod::ipc) &&
      state_->takers.contains(call_.first()))
    record.fresh_bytes = 0;
}

std::vector<int> DeviceTransfer::nccl_members(std::span<const TransferMethod> ways) const {
  std::vector<int> members{call_.first()};
  for (std::size_t at = 1; at < ways.size(); ++at)
    if (ways[at] == TransferMethod::nccl) members.push_back(call_.list[at]);
  return members;
}

void DeviceTransfer::move(const gather::Records& records, ExchangeReport& report) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<DeviceFacts> facts;
  for (const int rank : call_.list) facts.push_back(get_facts(records[static_cast<std::size_t>(rank)]));
  const std::vector<TransferMethod> ways = choose_ways(facts);
  const TransferMethod way = ways[call_.position];
  if (call_.is_first())
    receive(ways, records, report);
  else
    send(way, ways, records, report);
  if (manner_.empty()) return;
  report.phases.push_back(
      {"device: " + manner_, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
       call_.is_sender() ? records[static_cast<std::size_t>(call_.group->rank())].moving_bytes : 0, 1, 0});
}

void DeviceTransfer::copy_to_host() {
  staged_.emplace(*call_.value, *state_, call_.options->memory_budget);
  staged_->start();
  staged_->finish(*call_.group, call_.wait("gather: copying from devices"));
  inner_call_.value = &staged_->tree();
}

void DeviceTransfer::stage(const gather::Records& records, ExchangeReport& report) {
  inner_->move(records, report);
  manner_ = staged_ ? "page-locked memory, sent on" : filler_.manner();
}

void DeviceTransfer::send(TransferMethod way, std::span<const TransferMethod> ways, const gather::Records& records,
                          ExchangeReport& report) {
  DeviceSending sending(call_, *state_);
  switch (way) {
    case TransferMethod::nothing:
      return inner_->move(records, report);
    case TransferMethod::staging:
      return stage(records, report);
    case TransferMethod::ipc:
      if (!sending.by_ipc()) {
        state_->takers.erase(call_.first());
        return stage(records, report);
      }
      state_->takers.insert(call_.first());
      manner_ = "CUDA IPC";
      return;
    case TransferMethod::nccl: {
      const std::vector<int> members = nccl_members(ways);
      sending.by_nccl(members);
      manner_ = "NCCL";
      return;
    }
  }
}

void DeviceTransfer::receive(std::span<const TransferMethod> ways, const gather::Records& records,
                             ExchangeReport& report) {
  gather::Attempts attempt(*call_.group);
  if (!lands_on_device()) {
    attempt([&] {
      if (!has_device_tensors_) return;
      staged_.emplace(*call_.value, *state_, call_.options->memory_budget);
      staged_->start();
    });
    // The data of the other ranks is received even if this rank's own copy has failed.
    attempt([&] { inner_->move(records, report); });
    attempt([&] {
      if (attempt.have_failed() || !staged_) return;
      staged_->finish(*call_.group, call_.wait("gather: copying from devices"));
      own_ = staged_->take();
      manner_ = "own tensors to page-locked memory";
    });
    attempt.throw_failure();
    return;
  }
  std::optional<int> device;
  if (call_.value != nullptr)
    visit_device_tensors(*call_.value, [&](const Tensor& tensor) {
      if (!device) device = tensor.device().index;
    });
  if (!device && std::ranges::any_of(ways, [](TransferMethod way) { return way != TransferMethod::nothing; })) {
    // This also runs if there is no driver, so that staged senders do not wait for ever.
    attempt([&] { device = current_device().value_or(0); });
  }
  gather::Records left = records;
  const auto record_at = [&](std::size_t at) -> const ExchangeRecord& {
    return left[static_cast<std::size_t>(call_.list[at])];
  };
  destination_.emplace(call_, *state_, device.value_or(0));
  if (call_.options->root_tensors == RootTensors::copy && has_device_tensors_)
    attempt([&] { own_ = destination_->copy_of(*call_.value); });
  std::vector<std::size_t> by_nccl;
  for (std::size_t at = 1; at < ways.size(); ++at) {
    if (ways[at] == TransferMethod::nccl) by_nccl.push_back(at);
    if (ways[at] != TransferMethod::ipc) {
      // This sender no longer reports which of its allocations it has freed.
      state_->opened.close_all_of(call_.list[at]);
      continue;
    }
    bool is_taken = true;
    attempt([&] { is_taken = destination_->take_ipc(at, record_at(at)); });
    if (is_taken) left.drop_value(call_.list[at]);
  }
  if (!by_nccl.empty()) {
    attempt([&] { destination_->take_nccl(by_nccl, records); });
    for (const std::size_t at : by_nccl) left.drop_value(call_.list[at]);
  }
  attempt([&] {
    for (std::size_t at = 1; at < ways.size(); ++at)
      if (ways[at] != TransferMethod::nothing && record_at(at).has_value)
        destination_->reserve(at, record_at(at).moving_bytes);
  });
  attempt([&] { inner_->move(left, report); });
  attempt([&] { destination_->finish(); });
  attempt.throw_failure();
  manner_ = "received on cuda:" + std::to_string(device.value_or(0));
}

void DeviceTransfer::commit() noexcept {
  inner_->commit();
  is_committed_ = true;
}

std::vector<std::optional<Config>> DeviceTransfer::deliver() {
  std::vector<std::optional<Config>> entries = inner_->deliver();
  if (destination_) {
    try {
      std::vector<std::optional<Config>> staged(entries.size());
      for (std::size_t at = 1; at < entries.size(); ++at)
        if (entries[at]) staged[at] = destination_->upload(at, *entries[at]);
      destination_->finish();
      // The slots from which the copies were made are returned only now.
      entries = std::move(staged);
      destination_->deliver(entries);
    } catch (const Error& error) {
      // The other ranks have closed the exchange. They receive the failure in their next call.
      call_.group->abort(error);
      is_committed_ = false;
      throw call_.group->error().value_or(error);
    }
  }
  if (own_) entries.front() = std::move(own_);
  return entries;
}

std::uint64_t DeviceTransfer::pool_bytes() const noexcept {
  return inner_->pool_bytes() + state_->bytes();
}

class DeviceRoute final : public gather::RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::device; }
  [[nodiscard]] bool is_usable(const GatherCall& call) const override {
    return call.operation != gather::GatherKind::merge && call.operation != gather::GatherKind::stream &&
           call.options->workspace.path.empty() && route_underneath(call) != nullptr;
  }
  [[nodiscard]] std::string obstacle(const GatherCall& call) const override {
    if (call.operation == gather::GatherKind::stream)
      return "this route serves gathers of configs and tensors: gather_each copies device tensors to the host for any "
             "route";
    if (call.operation == gather::GatherKind::merge)
      return "this route serves gathers of configs and tensors (call config_to_host() of muster/cuda.hpp first)";
    if (!call.options->workspace.path.empty()) return "workspace.path is set, and files need tensors on the host";
    return "device tensors need shared memory, MPI or a workspace between the ranks, and they have none in common";
  }
  [[nodiscard]] std::string reason(const GatherCall& call) const override {
    return call.options->devices.destination == Destination::device
               ? "tensors are on devices, and the destination is the root's device"
               : "tensors are on devices, and the destination is host memory";
  }
  std::unique_ptr<gather::Preflight> preflight(const GatherCall& call, ExchangeRecord& record) const override {
    const gather::RouteDriver* const underneath = route_underneath(call);
    return underneath == nullptr ? nullptr : underneath->preflight(call, record);
  }
  std::unique_ptr<gather::Transfer> begin(const GatherCall& call) const override {
    return std::make_unique<DeviceTransfer>(call);
  }
  [[nodiscard]] bool moves(const TensorView&) const override { return true; }
  std::uint64_t settle(Group& group, Keep keep) const override {
    DeviceState& state = *device_state_of(group);
    const std::uint64_t bytes = state.bytes();
    if (keep == Keep::nothing) trim_stream_staging(group);
    return keep == Keep::nothing ? bytes - state.trim() : bytes;
  }
  std::uint64_t trim(Group& group) const override {
    return device_state_of(group)->trim() + trim_stream_staging(group) + pinned_pool_of_process()->trim();
  }
  void clean_up(Group& group) const noexcept override {
    DeviceState& state = *device_state_of(group);
    state.nccl.clear();
    state.drop_queues();
    state.opened.close_all();
  }
};

// The route exists in every program that loads this library.
const bool is_registered = [] {
  gather::RouteTable::instance().add(std::make_unique<DeviceRoute>());
  return true;
}();

}  // namespace
}  // namespace muster::cuda
