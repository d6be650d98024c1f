// SPDX-License-Identifier: Apache-2.0
// The route of lists with one rank: its own value is the result, and nothing travels.

#include "src/gather/merge_transfer.hpp"
#include "src/gather/route.hpp"

namespace muster::gather {
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
