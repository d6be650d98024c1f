// SPDX-License-Identifier: Apache-2.0
#pragma once
// The memory that ranks take for an exchange and for the parts of a stream. The functions are pure and use the records
// of round 1, so they give the same result on all ranks. A sender over shared memory knows its need in advance. For a
// root that merges or that receives from other hosts, the need follows from the records of the other ranks.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "src/gather/record.hpp"

namespace muster::gather {

/// Returns the size of a piece of the window. A merge whose rows do not arrive at their final place uses a window with
/// two pieces per sender. `largest`: size of the largest tensor that uses the window.
std::uint64_t merge_piece_bytes(std::size_t senders, std::uint64_t largest) noexcept;
/// Returns the size of the whole window.
std::uint64_t merge_window_bytes(std::size_t senders, std::uint64_t largest) noexcept;

/// Returns the memory that a rank of the list `members` takes in addition to what it has. Returns 0 if it is not known
/// in advance. In that case the rank itself checks before it takes memory.
std::uint64_t fresh_bytes_of(int rank, const std::vector<int>& members, std::span<const Record> records,
                             const SyncGroup& group);

struct StreamShare {
  std::uint64_t budget = 0;      ///< memory of one sender, in bytes
  std::uint64_t part_bytes = 0;  ///< tensor bytes of one sender in a part
  bool is_cut = false;           ///< less than requested, because the host has less memory available
};

/// Returns the share of each sender if a list of `length` ranks has `budget` bytes. All shares are equal: `depth` slots
/// of whole pages, each with one header page. Throws Error(argument) if that leaves no page for data.
StreamShare share_of(std::uint64_t budget, std::uint32_t length, std::uint32_t depth);

/// Returns the share of the list that contains `mine`. All memory of a list is on the host of its root: memory of
/// senders on that host, and the root's own memory for data from other hosts. If the budgets of all lists on a host
/// exceed the available memory, each budget is reduced in proportion. Returns an empty share for a rank in no list.
/// Throws Error(no_space) on all ranks alike.
StreamShare agree_on_share(const Record& mine, std::span<const Record> records,
                           const std::function<int(int rank)>& host_of);

}  // namespace muster::gather
