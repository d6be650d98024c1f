// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/host_tree.hpp"

#include <algorithm>

namespace muster::mpi {

std::vector<int> HostTree::children(int host) const {
  std::vector<int> all;
  const int first = host * most_children + 1;
  for (int child = first; child < std::min(first + most_children, hosts); ++child) all.push_back(child);
  return all;
}

std::vector<int> HostTree::with_all_below(int host) const {
  std::vector<int> all{host};
  for (const int child : children(host)) {
    const std::vector<int> below = with_all_below(child);
    all.insert(all.end(), below.begin(), below.end());
  }
  return all;
}

int HostTree::depth(int host) const noexcept {
  int steps = 0;
  for (int at = host; at != 0; at = parent(at)) ++steps;
  return steps;
}

int HostTree::height(int host) const noexcept {
  int steps = 0;
  // Its first child is nowhere nearer to the end than the others.
  for (int at = host * most_children + 1; at < hosts; at = at * most_children + 1) ++steps;
  return steps;
}

}  // namespace muster::mpi
