// SPDX-License-Identifier: Apache-2.0
// The routes between hosts, one per transport. Ranks of other hosts send to the root over the transport. Ranks of the
// root's host use shared memory, in the same exchange.
//
// Before round 1 the route behaves as the shared-memory route, except that tensors of an arena are copied like all
// others. The root announces the size of its pool and how far it may grow. So all ranks know from the records whether
// there is enough memory (policy.hpp). The root takes tensors from shared memory while the other hosts send
// (stream_protocol.hpp). The received data is memory of the root's own pool, so it stays valid if any rank dies. Merges
// are in merge.cpp.

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "src/base/escaped.hpp"
#include "src/gather/opening.hpp"
#include "src/gather/route.hpp"
#include "src/multihost/carriers.hpp"
#include "src/multihost/stream_protocol.hpp"

namespace muster::multihost {

bool goes_between_hosts(const gather::GatherCall& call, const HostsGroup& group, int sender) {
  return gather::is_between_hosts(call.forced) || group.host_of(sender) != group.host_of(call.first());
}

void offer_to_receive(const gather::GatherCall& call, BufferPool& pool, gather::ExchangeRecord& record) {
  record.receives = true;
  const std::uint64_t held = pool.bytes() + merge_ring_bytes(*call.group);
  const bool has_windows = call.operation == gather::GatherKind::merge;
  record.free = pool.free_bytes() + (has_windows ? merge_ring_bytes(*call.group, &call.list) : 0);
  record.room = call.options->memory_budget - std::min(call.options->memory_budget, held);
  const os::MemoryHeadroom room = pool.headroom();
  record.available_bytes = room.bytes;
  record.limit = room.limit;
}

namespace {

using gather::ExchangeRecord;
using gather::GatherCall;
using gather::GatherKind;

class HostsTransfer final : public gather::Transfer {
 public:
  HostsTransfer(const GatherCall& call, HostsGroup& group) : call_(call), group_(group), carriers_(call, group) {
    if (call_.is_sender() && goes_between_hosts(call_, group_, group_.rank()) &&
        (call_.value != nullptr || carriers_.are_used())) {
      sender_.emplace(call_, group_);
      riders_ = carriers_.riders();
    } else if (group.region_of(group.rank()) != nullptr)
      near_ = gather::RouteTable::instance().find(Route::shm)->begin(call_);
  }

  void offer(ExchangeRecord& record) override {
    if (sender_) sender_->offer(call_.value, record);
    if (near_) near_->offer(record);
    if (call_.is_first()) offer_to_receive(call_, *buffer_pool_of(group_), record);
    payload_bytes_ = record.payload_bytes;
  }
  void move(const gather::Records& records, ExchangeReport& report) override {
    if (call_.is_first()) return receive(records, report);
    if (near_) return near_->move(records, report);
    if (!sender_) return;
    report.network_bytes += payload_bytes_;
    send(records);
  }
  void commit() noexcept override {
    if (near_) near_->commit();
  }
  std::vector<std::optional<Config>> deliver() override {
    std::vector<std::optional<Config>> entries;
    if (near_) entries = near_->deliver();
    entries.resize(call_.list.size());
    for (auto& [position, value] : received_) entries[position] = std::move(value);
    return entries;
  }
  std::vector<std::unique_ptr<gather::OutstandingLease>> obligations() override {
    return near_ ? near_->obligations() : std::vector<std::unique_ptr<gather::OutstandingLease>>{};
  }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override {
    return (near_ ? near_->pool_bytes() : 0) + buffer_pool_of(group_)->bytes();
  }

 private:
  void send(const gather::Records& records) {
    const WaitOptions wait = call_.wait("gather: sending");
    const int self = group_.rank();
    const bool fits = carriers_.are_used() && fits_carrier(records[static_cast<std::size_t>(self)]);
    const int carrier = carriers_.carrier_of(self);
    if (carriers_.are_used()) sender_->be_one_of_many(fits ? most_carried : rides_along);
    if (carrier != self) {
      sender_->pass_to(carrier, fits, wait);
      if (fits) return;
    } else if (carriers_.are_used()) {
      sender_->carry(riders_, wait);
    }
    if (call_.value != nullptr) sender_->send_only(wait);
  }

  void receive(gather::Records records, ExchangeReport& report) {
    WaitOptions wait = call_.wait("gather: receiving");
    // A carrier names the rank that it waits for first.
    if (carriers_.are_used()) wait.timeout = group::timeout_of(wait, group_) + wait_step;
    std::vector<Receiver::SenderLimit> sources;
    for (std::size_t position = 1; position < call_.list.size(); ++position) {
      const int sender = call_.list[position];
      const ExchangeRecord& record = records[static_cast<std::size_t>(sender)];
      if (!record.has_value || !goes_between_hosts(call_, group_, sender)) continue;
      report.network_bytes += record.payload_bytes;
      received_.emplace_back(position, std::nullopt);
      sources.push_back({sender, record.moving_bytes, fits_carrier(record) ? carriers_.carrier_of(sender) : sender});
      // The shared-memory transfer must ignore this sender.
      records.drop_value(sender);
    }
    Receiver receiver(call_, group_, std::move(sources));
    gather::Attempts attempt(group_);
    bool are_well = false;
    attempt([&] { are_well = receiver.take_heads(wait); });
    if (near_) attempt([&] { near_->move(records, report); });
    // This also runs if the shared-memory transfer failed: the other hosts send, and the transport writes into this
    // memory.
    attempt([&] { receiver.take_all(wait); });
    attempt.throw_failure();
    // A sender that cannot send reports the reason in round 2.
    if (!are_well) return;
    for (auto& [position, value] : received_) value = receiver.take_only(call_.list[position]);
  }

  const GatherCall& call_;
  HostsGroup& group_;
  const Carriers carriers_;
  std::uint64_t payload_bytes_ = 0;
  std::optional<Sender> sender_;                                         // to another host
  std::vector<int> riders_;                                              // ranks with parts that this rank sends
  std::unique_ptr<gather::Transfer> near_;                               // on the host of the root
  std::vector<std::pair<std::size_t, std::optional<Config>>> received_;  // from other hosts, by position in the list
};

class HostsRoute final : public gather::RouteDriver {
 public:
  HostsRoute(Route route, std::string name, std::string remedy)
      : route_(route), name_(std::move(name)), remedy_(std::move(remedy)) {}

  [[nodiscard]] Route route() const noexcept override { return route_; }
  [[nodiscard]] bool is_usable(const GatherCall& call) const override {
    return call.group->kind() == to_string(route_);
  }
  [[nodiscard]] std::string obstacle(const GatherCall& call) const override {
    return fmt::format("the group is of kind {}: {}", in_quotes(call.group->kind()), remedy_);
  }
  [[nodiscard]] std::string reason(const GatherCall&) const override {
    return fmt::format("the ranks of the list are on several hosts: {} between hosts, shared memory on the root's host",
                       name_);
  }
  std::unique_ptr<gather::Transfer> begin(const GatherCall& call) const override {
    HostsGroup& group = HostsGroup::of(*call.group);
    if (call.operation == GatherKind::merge) return make_hosts_merge(call, group);
    return std::make_unique<HostsTransfer>(call, group);
  }
  std::unique_ptr<gather::PartSender> open_part_sender(const GatherCall& call) const override {
    HostsGroup& group = HostsGroup::of(*call.group);
    if (!call.is_sender() || !goes_between_hosts(call, group, group.rank())) return nullptr;
    return std::make_unique<Sender>(call, group);
  }
  std::unique_ptr<gather::PartReceiver> open_part_receiver(const GatherCall& call,
                                                           std::uint64_t part_bytes) const override {
    HostsGroup& group = HostsGroup::of(*call.group);
    std::vector<Receiver::SenderLimit> sources;
    for (std::size_t position = 1; position < call.list.size(); ++position)
      if (goes_between_hosts(call, group, call.list[position])) sources.push_back({call.list[position], part_bytes});
    return std::make_unique<Receiver>(call, group, sources);
  }
  [[nodiscard]] bool receives_into_own() const noexcept override { return true; }
  // Bytes for another host must be copied, wherever they are.
  [[nodiscard]] bool moves(const TensorView&) const override { return true; }
  std::uint64_t settle(Group& group, Keep keep) const override {
    const std::uint64_t kept = buffer_pool_of(group)->settle();
    return keep == Keep::nothing ? kept - buffer_pool_of(group)->trim(0) : kept;
  }
  std::uint64_t trim(Group& group) const override { return buffer_pool_of(group)->trim(0) + trim_merge_rings(group); }

 private:
  Route route_;
  std::string name_;
  std::string remedy_;
};

}  // namespace

void add_route(Route route, std::string name, std::string remedy) {
  gather::RouteTable::instance().add(std::make_unique<HostsRoute>(route, std::move(name), std::move(remedy)));
}

}  // namespace muster::multihost
