// SPDX-License-Identifier: Apache-2.0
#pragma once
// How much memory a rank has to take for an exchange, from the records of round 1: pure functions, the same on all
// ranks. A sender over shared memory knows before; a first rank that merges, or to which ranks of other hosts send, is
// told by the others' records.

#include <cstddef>
#include <cstdint>
#include <span>

#include "src/gather/record.hpp"

namespace muster::gather {

/// Places in Record::facts, of a first rank that receives into memory of its own (Record::receives).
enum ReceiveFact : std::size_t {
  fact_free = 1,  ///< bytes of its pool that nobody holds
  fact_room = 2,  ///< by how many more its pool may grow: what its memory_budget leaves
};

/// A merge whose rows do not arrive where they belong goes through a window: two pieces of this size a sender.
/// `largest`: of the tensors that go through it.
std::uint64_t merge_piece_bytes(std::size_t senders, std::uint64_t largest) noexcept;
/// All of the window.
std::uint64_t merge_window_bytes(std::size_t senders, std::uint64_t largest) noexcept;

/// Memory that a rank of the list `members` takes, beyond what it has. 0 if that is not known before (then the rank
/// itself looks before it takes any).
std::uint64_t fresh_bytes_of(int rank, const std::vector<int>& members, std::span<const Record> records,
                             const SyncGroup& group);
/// Likewise, of a single rank: the list is looked for among all records.
std::uint64_t fresh_bytes_of(int rank, std::span<const Record> records, const SyncGroup& group);

}  // namespace muster::gather
