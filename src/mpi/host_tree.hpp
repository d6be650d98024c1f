// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tree that the records of a round go up and down by. With one hub for all hosts it would send all records as often
// as there are hosts: 268 MB a round for 4,096 ranks on 512 hosts. With few hosts the tree is that hub.

#include <algorithm>
#include <vector>

namespace muster::mpi {

/// Of hosts 0 to `hosts` - 1; host 0 is its root, and each has at most most_children right below it.
struct HostTree {
  static constexpr int most_children = 8;

  int hosts = 1;

  /// -1 of the root.
  [[nodiscard]] int parent(int host) const noexcept { return host == 0 ? -1 : (host - 1) / most_children; }
  /// Right below, ascending.
  [[nodiscard]] std::vector<int> children(int host) const {
    std::vector<int> all;
    const int first = host * most_children + 1;
    for (int child = first; child < std::min(first + most_children, hosts); ++child) all.push_back(child);
    return all;
  }
  /// The host itself and all below it: each before its children, and they with all of theirs in order.
  [[nodiscard]] std::vector<int> with_all_below(int host) const {
    std::vector<int> all{host};
    for (const int child : children(host)) {
      const std::vector<int> below = with_all_below(child);
      all.insert(all.end(), below.begin(), below.end());
    }
    return all;
  }
  /// Steps to the root.
  [[nodiscard]] int depth(int host) const noexcept {
    int steps = 0;
    for (int at = host; at != 0; at = parent(at)) ++steps;
    return steps;
  }
  /// Steps to the farthest host below.
  [[nodiscard]] int height(int host) const noexcept {
    int steps = 0;
    // Its first child is nowhere nearer to the end than the others.
    for (int at = host * most_children + 1; at < hosts; at = at * most_children + 1) ++steps;
    return steps;
  }
};

}  // namespace muster::mpi
