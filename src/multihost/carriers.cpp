// SPDX-License-Identifier: Apache-2.0
#include "src/multihost/carriers.hpp"

#include <algorithm>
#include <iterator>

namespace muster::multihost {

Carriers::Carriers(const gather::GatherCall& call, const HostsGroup& group) : call_(call), group_(group) {
  const bool is_plain = call.operation == gather::GatherKind::configs || call.operation == gather::GatherKind::tensors;
  if (!is_plain || !call.all_move) return;
  const int home = group.host_of(call.first());
  const auto is_elsewhere = [&](int rank) { return group.host_of(rank) != home; };
  if (static_cast<std::size_t>(std::ranges::count_if(call.list, is_elsewhere)) <= most_direct_senders) return;
  are_used_ = true;
  const int own = group.host_of(group.rank());
  for (const int rank : call.list)
    if (is_elsewhere(rank) && (call.is_first() || group.host_of(rank) == own))
      of_hosts_.emplace(group.host_of(rank), rank);
}

int Carriers::carrier_of(int sender) const {
  const auto found = of_hosts_.find(group_.host_of(sender));
  return found == of_hosts_.end() ? sender : found->second;
}

std::vector<int> Carriers::riders() const {
  const int self = group_.rank();
  std::vector<int> riders;
  if (!are_used() || carrier_of(self) != self) return riders;
  std::ranges::copy_if(call_.list, std::back_inserter(riders),
                       [&](int rank) { return rank != self && carrier_of(rank) == self; });
  return riders;
}

}  // namespace muster::multihost
