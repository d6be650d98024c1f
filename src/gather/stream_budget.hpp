// SPDX-License-Identifier: Apache-2.0
#pragma once
// How large a part of a stream may be: pure functions of what all ranks said in the opening round.

#include <cstdint>
#include <functional>
#include <span>

#include "src/gather/record.hpp"

namespace muster::gather {

/// Places in Record::facts.
enum StreamFact : std::size_t {
  fact_budget = 0,  // bytes of all senders of the list
  fact_depth = 1,   // pipeline_depth
  fact_pooled = 2,  // bytes that this rank has already
};

struct StreamShare {
  std::uint64_t budget = 0;      ///< of one sender, in bytes of memory
  std::uint64_t part_bytes = 0;  ///< tensor bytes of one sender in a part
  bool is_cut = false;           ///< less than was asked for, because there is not more
};

/// The share of each sender where a list of `length` ranks has `budget` bytes: equal, in `depth` slots of whole pages
/// with a page of words each. Throws Error(argument) if that leaves no page for bytes.
StreamShare share_of(std::uint64_t budget, std::uint32_t length, std::uint32_t depth);

/// The share of the list that `mine` belongs to. All memory of a list is on the host of its first rank: of senders
/// there, and its own for what others send. Where the budgets of all lists of a host are more than what is available
/// there, each is cut in proportion. Nothing for a rank in no list. Throws Error(no_space) on all ranks alike.
StreamShare agree_on_share(const Record& mine, std::span<const Record> records,
                           const std::function<int(int rank)>& host_of);

}  // namespace muster::gather
