// SPDX-License-Identifier: Apache-2.0
// The table of routes, and what drivers do if they say nothing else.

#include "src/gather/route.hpp"

#include <algorithm>

#include "src/shm/arena_core.hpp"

namespace muster::gather {

bool RouteDriver::moves(const TensorView& tensor) const {
  return !tensor.is_contiguous() || !detail::ArenaCore::find(tensor.data(), tensor.nbytes());
}

std::string RouteDriver::obstacle(const Call&) const {
  return "it cannot be used here";
}

std::unique_ptr<Proof> RouteDriver::prove(const Call&, Record&) const {
  return nullptr;
}

std::unique_ptr<PartOutlet> RouteDriver::open_outlet(const Call&) const {
  return nullptr;
}

std::unique_ptr<PartInlet> RouteDriver::open_inlet(const Call&, std::uint64_t) const {
  return nullptr;
}

RouteTable::RouteTable() {
  add(make_local_route());
  add(make_shm_route());
  add(make_workspace_route());
}

RouteTable& RouteTable::instance() {
  static RouteTable table;
  return table;
}

void RouteTable::add(std::unique_ptr<RouteDriver> driver) {
  const std::lock_guard lock(adding_);
  const std::size_t count = count_.load(std::memory_order_relaxed);
  drivers_.at(count) = std::move(driver);
  count_.store(count + 1, std::memory_order_release);
}

void RouteTable::set_staging(std::unique_ptr<HostStaging> staging) {
  staging_.store(staging.release(), std::memory_order_release);
}

const RouteDriver* RouteTable::find(Route route) const noexcept {
  const auto known = drivers();
  const auto found = std::ranges::find_if(known, [&](const auto& driver) { return driver->route() == route; });
  return found == known.end() ? nullptr : found->get();
}

// The route of lists with one rank: its own value is the result, and nothing travels.

namespace {

class LocalTransfer final : public Transfer {
 public:
  void offer(Record&) override {}
  void move(std::span<const Record>, ExchangeReport&) override {}
  std::vector<std::optional<Config>> deliver() override { return std::vector<std::optional<Config>>(1); }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return 0; }
};

class LocalRoute final : public RouteDriver {
 public:
  [[nodiscard]] Route route() const noexcept override { return Route::local; }
  [[nodiscard]] bool is_usable(const Call& call) const override { return call.list.size() == 1; }
  [[nodiscard]] std::string obstacle(const Call&) const override { return "it is for lists of one rank"; }
  [[nodiscard]] std::string reason(const Call&) const override { return "the list has one rank"; }
  std::unique_ptr<Transfer> begin(const Call& call) const override {
    if (call.operation == Operation::merge) return make_unmoved_merge(call);
    return std::make_unique<LocalTransfer>();
  }
  std::uint64_t settle(SyncGroup&, Keep) const override { return 0; }
  std::uint64_t trim(SyncGroup&) const override { return 0; }
  void clean_up(SyncGroup&) const noexcept override {}
};

}  // namespace

std::unique_ptr<RouteDriver> make_local_route() {
  return std::make_unique<LocalRoute>();
}

}  // namespace muster::gather
