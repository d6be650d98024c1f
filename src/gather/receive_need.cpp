// SPDX-License-Identifier: Apache-2.0
#include "src/gather/receive_need.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include "src/gather/merge_record.hpp"
#include "src/os/pages.hpp"

namespace muster::gather {
namespace {

// Of the whole window: large enough that a link does not run dry, and no more than a few of many senders' tensors.
constexpr std::uint64_t window = 64 << 20;
constexpr std::uint64_t largest_piece = 4 << 20;
constexpr std::uint64_t smallest_piece = 16 << 10;

/// What all ranks compute is the same on all hosts, whatever their pages are.
std::uint64_t in_pages(std::uint64_t bytes) noexcept {
  return os::whole_pages(bytes, 4096);
}

std::uint64_t plus(std::uint64_t a, std::uint64_t b) {
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

std::vector<int> members_of(const Record& first, std::span<const Record> records) {
  std::vector<int> members;
  for (std::size_t rank = 0; rank < records.size(); ++rank)
    if (records[rank].list_length != 0 && records[rank].list_hash == first.list_hash)
      members.push_back(static_cast<int>(rank));
  return members;
}

/// What a merge needs: its result, and the window.
std::uint64_t merged_bytes(const Record& first, const std::vector<int>& members, std::span<const Record> records) {
  std::uint64_t sum = 0;
  std::uint64_t largest = 0;
  for (const int member : members) {
    const std::uint64_t bytes = records[static_cast<std::size_t>(member)].moving_bytes;
    sum = plus(sum, bytes);
    largest = std::max(largest, bytes);
  }
  const std::uint64_t target = merge_reduces(first.merge) ? first.moving_bytes : sum;
  return plus(in_pages(target), merge_window_bytes(members.size() - 1, largest));
}

}  // namespace

std::uint64_t merge_piece_bytes(std::size_t senders, std::uint64_t largest) noexcept {
  const std::uint64_t share = std::bit_floor(window / 2 / std::max<std::uint64_t>(senders, 1));
  return std::min(std::clamp(share, smallest_piece, largest_piece), in_pages(largest));
}

std::uint64_t merge_window_bytes(std::size_t senders, std::uint64_t largest) noexcept {
  return 2 * senders * merge_piece_bytes(senders, largest);
}

std::uint64_t fresh_bytes_of(int rank, std::span<const Record> records, const SyncGroup& group) {
  return fresh_bytes_of(rank, members_of(records[static_cast<std::size_t>(rank)], records), records, group);
}

std::uint64_t fresh_bytes_of(int rank, const std::vector<int>& members, std::span<const Record> records,
                             const SyncGroup& group) {
  const Record& own = records[static_cast<std::size_t>(rank)];
  if (!own.receives)
    return own.operation == Operation::merge ? merge_fresh_bytes(rank, members, records) : own.fresh_bytes;
  std::uint64_t needed = 0;
  if (own.operation == Operation::merge) {
    needed = merged_bytes(own, members, records);
  } else {
    for (const int member : members) {
      const bool is_far = own.forced == Route::mpi || group.host_of(member) != group.host_of(rank);
      if (member != rank && is_far)
        needed = plus(needed, in_pages(records[static_cast<std::size_t>(member)].moving_bytes));
    }
  }
  return needed - std::min(needed, own.facts[fact_free]);
}

}  // namespace muster::gather
