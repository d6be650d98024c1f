// SPDX-License-Identifier: Apache-2.0
#include "src/gather/needs.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <map>

#include "src/gather/merge_record.hpp"
#include "src/os/pages.hpp"
#include "src/shm/segment.hpp"

namespace muster::gather {
namespace {

// Size of the whole window: large enough to keep a network link busy, and no more than a few tensors of many senders.
constexpr std::uint64_t window = 64 << 20;
constexpr std::uint64_t largest_piece = 4 << 20;
constexpr std::uint64_t smallest_piece = 16 << 10;

/// All ranks must compute the same numbers, whatever the page size of their host is.
constexpr std::uint64_t page_bytes = 4096;
static_assert(shm::header_bytes == page_bytes);

std::uint64_t in_pages(std::uint64_t bytes) noexcept {
  return os::whole_pages(bytes, page_bytes);
}

std::uint64_t plus(std::uint64_t a, std::uint64_t b) {
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/// Returns the memory that a merge needs: its result and the window.
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
      const bool is_far = is_between_hosts(own.forced) || group.host_of(member) != group.host_of(rank);
      if (member != rank && is_far)
        needed = plus(needed, in_pages(records[static_cast<std::size_t>(member)].moving_bytes));
    }
  }
  return needed - std::min(needed, own.free);
}

namespace {

std::uint64_t senders_of(std::uint32_t length) {
  return std::max<std::uint32_t>(length, 2) - 1;
}

std::uint64_t least_budget(std::uint32_t length, std::uint32_t depth) {
  return (shm::header_bytes + page_bytes) * depth * senders_of(length);
}

/// The budget of one list, and the memory that it would have to take.
struct ListNeed {
  int host = 0;
  std::uint64_t budget = 0;
  std::uint64_t held = 0;
  std::uint64_t least = 0;
  [[nodiscard]] std::uint64_t fresh() const { return budget - std::min(budget, held); }
};

struct HostRoom {
  double fresh = 0;  // sum over all lists; it may exceed 64 bits
  std::uint64_t available = UINT64_MAX;
  os::MemoryLimit limit = os::MemoryLimit::machine;
};

}  // namespace

StreamShare share_of(std::uint64_t budget, std::uint32_t length, std::uint32_t depth) {
  if (budget < least_budget(length, depth))
    throw Error(ErrorKind::argument,
                fmt::format("a memory_budget of {} bytes is too small for {} senders with a pipeline_depth of {}: at "
                            "least {} bytes",
                            budget, senders_of(length), depth, least_budget(length, depth)));
  StreamShare share;
  share.budget = budget / senders_of(length);
  share.part_bytes = share.budget / depth / page_bytes * page_bytes - shm::header_bytes;
  // Sizes of tensors are counted in 63 bits, and so is the size of a part.
  share.part_bytes = std::min<std::uint64_t>(share.part_bytes, INT64_MAX / page_bytes * page_bytes);
  return share;
}

StreamShare agree_on_share(const Record& mine, std::span<const Record> records,
                           const std::function<int(int rank)>& host_of) {
  std::map<std::uint64_t, ListNeed> lists;
  std::map<int, HostRoom> hosts;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const Record& record = records[i];
    if (record.list_length < 2) continue;
    const int host = host_of(static_cast<int>(i));
    ListNeed& list = lists[record.list_hash];
    list.budget = record.budget;
    list.least = least_budget(record.list_length, static_cast<std::uint32_t>(record.depth));
    list.held += record.pooled;
    if (record.position == 0) list.host = host;
    HostRoom& room = hosts[host];
    if (record.available_bytes < room.available) {
      room.available = record.available_bytes;
      room.limit = record.limit;
    }
  }
  for (const auto& [hash, list] : lists) hosts[list.host].fresh += static_cast<double>(list.fresh());
  const auto granted = [&](const ListNeed& list) {
    const HostRoom& room = hosts[list.host];
    const auto available = static_cast<double>(room.available);
    if (room.fresh <= available) return list.budget;
    return std::min(list.budget, list.held) +
           static_cast<std::uint64_t>(available * (static_cast<double>(list.fresh()) / room.fresh));
  };
  for (const auto& [hash, list] : lists)
    if (granted(list) < list.least)
      throw Error(
          ErrorKind::no_space,
          fmt::format("too little shared memory: a list of ranks needs {} bytes at least, and of the {} bytes "
                      "available ({}) its part is {}: give the job more memory",
                      list.least, hosts[list.host].available, os::to_string(hosts[list.host].limit), granted(list)));
  if (mine.list_length == 0) return {};
  if (mine.list_length == 1) return share_of(mine.budget, mine.list_length, static_cast<std::uint32_t>(mine.depth));
  const ListNeed& list = lists.at(mine.list_hash);
  StreamShare share = share_of(granted(list), mine.list_length, static_cast<std::uint32_t>(mine.depth));
  share.is_cut = granted(list) < list.budget;
  return share;
}

}  // namespace muster::gather
