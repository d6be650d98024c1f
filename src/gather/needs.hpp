// SPDX-License-Identifier: Apache-2.0
#pragma once
// How much memory ranks take: for an exchange, and in the parts of a stream. Pure functions of the records of round 1,
// the same on all ranks. A sender over shared memory knows before; a first rank that merges, or to which ranks of other
// hosts send, is told by the others' records.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "src/gather/record.hpp"

namespace muster::gather {

/// A merge whose rows do not arrive where they belong goes through a window: two pieces of this size a sender.
/// `largest`: of the tensors that go through it.
std::uint64_t merge_piece_bytes(std::size_t senders, std::uint64_t largest) noexcept;
/// All of the window.
std::uint64_t merge_window_bytes(std::size_t senders, std::uint64_t largest) noexcept;

/// Memory that a rank of the list `members` takes, beyond what it has. 0 if that is not known before (then the rank
/// itself looks before it takes any).
std::uint64_t fresh_bytes_of(int rank, const std::vector<int>& members, std::span<const Record> records,
                             const SyncGroup& group);

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
