// SPDX-License-Identifier: Apache-2.0

#include "tests/support/tcp_ranks.hpp"

#include <algorithm>

#include "muster/tcp.hpp"
#include "src/multihost/context.hpp"
#include "tests/support/networks.hpp"
#include "tests/support/temporary_directory.hpp"

namespace muster::test {
namespace {

class TcpMaker final : public GroupMaker {
 public:
  TcpMaker(int size, int hosts) : size_(size), hosts_(hosts) {
    if (hosts == 1) return;
    for (int host = 0; host < hosts; ++host) networks_.push_back(fresh_network());
    join_networks(networks_);
  }

  [[nodiscard]] std::shared_ptr<SyncGroup> join(int rank, std::chrono::milliseconds timeout) const override {
    if (hosts_ > 1) enter_network(networks_[static_cast<std::size_t>(rank * hosts_ / size_)]);
    std::shared_ptr<SyncGroup> group = tcp_group(
        {.address = hosts_ > 1 ? network_address(0) + ":29500" : "file://" + directory_.path().string() + "/meeting",
         .rank = rank,
         .size = size_,
         .timeout = timeout,
         .key = "test"});
    SyncGroup* plain = group.get();
    return {plain, [owner = std::move(group)](SyncGroup*) mutable {
              const bool is_well = !owner->failure();
              owner.reset();
              // Forked ranks end without exit().
              if (is_well) multihost::end_all("tcp");
            }};
  }

 private:
  int size_;
  int hosts_;
  TemporaryDirectory directory_{Medium::memory};
  std::vector<os::Fd> networks_;
};

}  // namespace

std::unique_ptr<GroupMaker> make_tcp_maker(int size, int hosts) {
  return std::make_unique<TcpMaker>(size, std::min(hosts, size));
}

}  // namespace muster::test
