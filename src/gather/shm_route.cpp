// SPDX-License-Identifier: Apache-2.0
// The shared memory route as the exchange sees it; what happens on its two sides is in shm_sending.cpp and
// shm_receiving.cpp.

#include <fmt/format.h>

#include <algorithm>

#include "src/gather/merge_transfer.hpp"
#include "src/gather/route.hpp"
#include "src/gather/shm_protocol.hpp"
#include "src/gather/shm_receiving.hpp"
#include "src/gather/shm_sending.hpp"

namespace muster::gather {

std::shared_ptr<ShmState> shm_state_of(SyncGroup& group) {
  static const char key = 0;
  return std::static_pointer_cast<ShmState>(group.extension(&key, [] { return std::make_shared<ShmState>(); }));
}

void forget_retired(ShmState& state) {
  std::erase_if(state.remotes, [](const auto& item) {
    return item.second.use_count() == 1 && item.second->header().retired.load(std::memory_order_acquire) != 0;
  });
}

namespace {

class ShmTransfer final : public Transfer {
 public:
  explicit ShmTransfer(const Call& call) : call_(call), state_(shm_state_of(*call.group)) {
    if (call_.is_first()) receiving_.emplace(call_, *state_);
    if (call_.is_sender() && call_.value != nullptr) sending_.emplace(call_, *state_);
  }

  void offer(Record& record) override {
    if (sending_) sending_->offer(record);
  }
  void move(std::span<const Record> records, ExchangeReport& report) override {
    if (sending_) sending_->move(report);
    if (receiving_) receiving_->move(records, report);
  }
  void commit() noexcept override {
    if (sending_) sending_->commit();
    if (receiving_) receiving_->commit();
  }
  std::vector<std::optional<Config>> deliver() override {
    return receiving_ ? receiving_->deliver() : std::vector<std::optional<Config>>{};
  }
  std::vector<std::unique_ptr<Obligation>> obligations() override {
    return sending_ ? sending_->obligations() : std::vector<std::unique_ptr<Obligation>>{};
  }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return state_->pool.bytes(); }

 private:
  const Call& call_;
  std::shared_ptr<ShmState> state_;
  std::optional<ShmSending> sending_;
  std::optional<ShmReceiving> receiving_;
};

class ShmRoute final : public RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::shm; }
  [[nodiscard]] bool is_usable(const Call& call) const override {
    return call.group->descriptor_channel() != nullptr &&
           std::ranges::all_of(call.list, [&](int rank) { return call.group->shares_memory(rank); });
  }
  [[nodiscard]] std::string obstacle(const Call& call) const override {
    if (call.group->descriptor_channel() == nullptr)
      return fmt::format("ranks of a '{}' group share no memory", call.group->kind());
    const auto apart = std::ranges::find_if(call.list, [&](int rank) { return !call.group->shares_memory(rank); });
    return fmt::format("shares no memory with rank {} (host {})", *apart, call.group->info(*apart).host);
  }
  [[nodiscard]] std::string reason(const Call&) const override { return "all ranks of the list share memory"; }
  std::unique_ptr<Transfer> begin(const Call& call) const override {
    if (call.operation == Operation::merge) return make_shm_merge(call);
    return std::make_unique<ShmTransfer>(call);
  }
  std::uint64_t settle(SyncGroup& group, Keep keep) const override {
    return shm_state_of(group)->pool.settle(keep == Keep::free_memory);
  }
  std::uint64_t trim(SyncGroup& group) const override { return shm_state_of(group)->pool.trim(); }
  void clean_up(SyncGroup& group) const noexcept override {
    const auto state = shm_state_of(group);
    for (int rank = 0; rank < group.size(); ++rank) {
      if (rank == group.rank() || !group.liveness(rank)->is_dead()) continue;
      state->pool.drop(rank);
      // What nobody looks at any more goes with its last mapping.
      std::erase_if(state->remotes, [&](const auto& item) { return item.first.first == rank; });
    }
  }
};

}  // namespace

std::unique_ptr<RouteDriver> make_shm_route() {
  return std::make_unique<ShmRoute>();
}

}  // namespace muster::gather
