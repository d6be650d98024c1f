// SPDX-License-Identifier: Apache-2.0
// The MPI route as the exchange sees it.

#include "src/mpi/mpi_route.hpp"

#include <fmt/core.h>

#include "src/gather/merge_record.hpp"
#include "src/gather/merge_transfer.hpp"
#include "src/gather/shm_receiving.hpp"
#include "src/gather/shm_sending.hpp"
#include "src/mpi/merge_rings.hpp"
#include "src/mpi/mpi_merge.hpp"
#include "src/mpi/part_stream.hpp"

namespace muster::mpi {

bool goes_by_mpi(const gather::Call& call, const MpiGroup& group, int sender) {
  return call.forced == Route::mpi || group.host_of(sender) != group.host_of(call.first());
}

namespace {

using gather::Call;
using gather::Operation;
using gather::Record;

class MpiTransfer final : public gather::Transfer {
 public:
  MpiTransfer(const Call& call, MpiGroup& group) : call_(call), group_(group) {
    const bool has_shm = group.descriptor_channel() != nullptr;
    if (has_shm) shm_ = gather::shm_state_of(*call.group);
    if (call_.is_first()) {
      receiving_.emplace(call_, group_, [this](int rank) { return goes_by_mpi(call_, group_, rank); });
      if (shm_) shm_receiving_.emplace(call_, *shm_);
      return;
    }
    if (!call_.is_sender() || call_.value == nullptr) return;
    if (goes_by_mpi(call_, group_, group_.rank()))
      sending_.emplace(call_, group_);
    else
      shm_sending_.emplace(call_, *shm_);
  }

  void offer(Record& record) override {
    if (sending_) sending_->offer(record);
    if (shm_sending_) shm_sending_->offer(record);
    if (receiving_) receiving_->offer(record);
  }
  void move(std::span<const Record> records, ExchangeReport& report) override {
    if (sending_) sending_->move(report);
    if (shm_sending_) shm_sending_->move(report);
    if (!receiving_) return;
    receiving_->move(
        records,
        [&] {
          if (shm_receiving_)
            shm_receiving_->move(records, report, [this](int rank) { return !goes_by_mpi(call_, group_, rank); });
        },
        report);
  }
  void commit() noexcept override {
    if (shm_sending_) shm_sending_->commit();
    if (shm_receiving_) shm_receiving_->commit();
  }
  std::vector<std::optional<Config>> deliver() override {
    std::vector<std::optional<Config>> entries(call_.list.size());
    if (shm_receiving_) entries = shm_receiving_->deliver();
    if (receiving_) receiving_->deliver(entries);
    return entries;
  }
  std::vector<std::unique_ptr<gather::Obligation>> obligations() override {
    return shm_sending_ ? shm_sending_->obligations() : std::vector<std::unique_ptr<gather::Obligation>>{};
  }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override {
    return (shm_ ? shm_->pool.bytes() : 0) + buffer_pool_of(group_)->bytes();
  }

 private:
  const Call& call_;
  MpiGroup& group_;
  std::shared_ptr<gather::ShmState> shm_;
  std::optional<MpiSending> sending_;
  std::optional<MpiReceiving> receiving_;
  std::optional<gather::ShmSending> shm_sending_;
  std::optional<gather::ShmReceiving> shm_receiving_;
};

class MpiRoute final : public gather::RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::mpi; }
  [[nodiscard]] bool is_usable(const Call& call) const override {
    return dynamic_cast<const MpiGroup*>(call.group) != nullptr;
  }
  [[nodiscard]] std::string obstacle(const Call& call) const override {
    return fmt::format(
        "the group is of kind '{}': make it with mpi_group(), or start the ranks with mpiexec and use "
        "world()",
        call.group->kind());
  }
  [[nodiscard]] std::string reason(const Call&) const override {
    return "the ranks of the list are on several hosts: MPI between them, shared memory on the first rank's";
  }
  std::unique_ptr<gather::Transfer> begin(const Call& call) const override {
    auto& group = dynamic_cast<MpiGroup&>(*call.group);
    if (call.operation != Operation::merge) return std::make_unique<MpiTransfer>(call, group);
    if (!gather::merge_moves(gather::merge_number(*call.merge)) || call.list.size() == 1)
      return gather::make_unmoved_merge(call);
    return make_mpi_merge(call, group);
  }
  std::unique_ptr<gather::PartOutlet> open_outlet(const Call& call) const override {
    auto& group = dynamic_cast<MpiGroup&>(*call.group);
    if (!call.is_sender() || !goes_by_mpi(call, group, group.rank())) return nullptr;
    return std::make_unique<MpiOutlet>(call, group);
  }
  std::unique_ptr<gather::PartInlet> open_inlet(const Call& call, std::uint64_t part_bytes) const override {
    return std::make_unique<MpiInlet>(call, dynamic_cast<MpiGroup&>(*call.group), part_bytes);
  }
  [[nodiscard]] bool receives_into_own() const noexcept override { return true; }
  // Bytes that go to another host move, wherever they are.
  [[nodiscard]] bool moves(const TensorView&) const override { return true; }
  std::uint64_t settle(SyncGroup& group, Keep keep) const override {
    const std::uint64_t kept = buffer_pool_of(group)->settle();
    return keep == Keep::nothing ? kept - buffer_pool_of(group)->trim(0) : kept;
  }
  std::uint64_t trim(SyncGroup& group) const override {
    return buffer_pool_of(group)->trim(0) + merge_rings_of(group)->trim();
  }
  void clean_up(SyncGroup&) const noexcept override {}
};

}  // namespace

std::unique_ptr<gather::RouteDriver> make_mpi_route() {
  return std::make_unique<MpiRoute>();
}

namespace {

// A program that has this library has the route: it stands behind those that every program has.
const bool is_registered = [] {
  gather::RouteTable::instance().add(make_mpi_route());
  return true;
}();

}  // namespace
}  // namespace muster::mpi
