// SPDX-License-Identifier: Apache-2.0
#pragma once
// The communicators of a group: one for each set of ranks that has gone by NCCL, made when it first does.
//
//  1. Each sender tells the first rank the number of the communicator that it has for these ranks; 0: none.
//  2. The first rank, when all have told: where all have the number that it has, that one is used; else it makes a new
//     identity under the next number, and says so to all.
//  3. All but those that keep theirs meet under that identity.
// So whoever has lost its end by a failure is met anew.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "src/device/nccl.hpp"

namespace muster::cuda {

class NcclLists {
 public:
  struct Entry {
    std::uint32_t number = 0;
    std::unique_ptr<Communicator> communicator;
  };
  /// Of these ranks, in this order. The reference is good until clear().
  Entry& of(std::span<const int> ranks) { return entries_[std::vector<int>(ranks.begin(), ranks.end())]; }
  /// An exchange has failed: what is under way is aborted.
  void clear() noexcept { entries_.clear(); }

 private:
  std::map<std::vector<int>, Entry> entries_;
};

}  // namespace muster::cuda
