// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/queue_ranks.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/escaped.hpp"
#include "src/collectives/shared_blocks.hpp"
#include "src/os/process.hpp"
#include "src/shm/segment.hpp"
#include "src/sync/failing.hpp"
#include "src/sync/group.hpp"
#include "src/sync/settings.hpp"

namespace muster {
namespace {

constexpr std::string_view handle_begin = "muster-queue:";
constexpr std::size_t key_bytes = 16;
constexpr int outside_number = -1;  // what errors call the writer
constexpr int most_ranks = static_cast<int>(shm::lease_words) - 1;

struct Handle {
  int ranks = 0;
  std::string key;
};

std::string handle_text(const Handle& handle) {
  return fmt::format("{}{},{}", handle_begin, handle.ranks, handle.key);
}

Handle parsed(const std::string& text) {
  Handle handle;
  if (text.starts_with(handle_begin)) {
    const std::string_view fields = std::string_view(text).substr(handle_begin.size());
    const std::size_t comma = std::min(fields.find(','), fields.size());
    std::from_chars(fields.data(), fields.data() + comma, handle.ranks);
    handle.key = fields.substr(std::min(comma + 1, fields.size()));
  }
  const bool is_key =
      handle.key.size() == 2 * key_bytes && handle.key.find_first_not_of("0123456789abcdef") == std::string::npos;
  // Every handle has one spelling.
  if (handle.ranks < 1 || handle.ranks > most_ranks || !is_key || handle_text(handle) != text)
    throw Error(ErrorKind::argument, fmt::format("'{}' is no handle of a queue: take what queue_handle() gave",
                                                 escaped(text.substr(0, 100))));
  return handle;
}

/// Collective: throws on all ranks if their options differ.
void agree(SyncGroup& group, const QueueOptions& options, bool has_outside, const WaitOptions& waits) {
  using Card = std::array<std::uint64_t, 5>;
  const Card mine{has_outside ? 0 : static_cast<std::uint64_t>(options.writer),
                  options.reader ? static_cast<std::uint64_t>(*options.reader) : std::uint64_t{1} << 40,
                  options.capacity, static_cast<std::uint64_t>(options.dead_reader),
                  XXH3_64bits(options.outside_writer.data(), options.outside_writer.size())};
  std::vector<Card> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), waits);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const RankInfo& info = group.info(static_cast<int>(rank));
    if (info.rank == outside_number)
      throw Error(ErrorKind::rank_mismatch, "the writer outside makes a queue with other options than the ranks");
    throw sync::error_of(info, ErrorKind::rank_mismatch,
                         fmt::format("ranks 0 and {} make a queue with other options", rank));
  }
}

void check(const QueueOptions& options, int size, bool has_outside) {
  const auto check_rank = [size](int rank, const char* what) {
    if (rank < 0 || rank >= size)
      throw Error(ErrorKind::argument,
                  fmt::format("a queue's {} {} is not in the group of {} ranks", what, rank, size));
  };
  if (!has_outside) check_rank(options.writer, "writer");
  if (options.reader) check_rank(*options.reader, "reader");
  if (options.capacity < (64U << 10) || options.capacity > (std::uint64_t{1} << 36))
    throw Error(ErrorKind::argument, fmt::format("a queue of {} bytes: 64 KiB to 64 GiB", options.capacity));
}

/// Collective, of the ranks and the writer.
collectives::QueueRanks meet(const Handle& handle, int rank, std::vector<int> numbers, std::chrono::milliseconds usual,
                             const QueueOptions& options, const WaitOptions& waits) {
  numbers.push_back(outside_number);
  collectives::QueueRanks met{nullptr, handle.ranks};
  try {
    met.group = local_group({.key = "queue " + handle.key,
                             .rank = rank,
                             .size = handle.ranks + 1,
                             .timeout = sync::timeout_of(options.waits.timeout, usual),
                             .numbers = std::move(numbers)});
  } catch (const Error& error) {
    throw error.with_context(
        fmt::format("a queue's ranks meet its writer outside, which is rank {} here", handle.ranks));
  }
  met.group->set_timeout(usual);
  agree(*met.group, options, true, waits);
  return met;
}

}  // namespace

std::string queue_handle(int ranks) {
  if (ranks < 1 || ranks > most_ranks)
    throw Error(ErrorKind::argument, fmt::format("a queue's handle for {} ranks: 1 to {}", ranks, most_ranks));
  return handle_text({ranks, os::random_hex(key_bytes)});
}

collectives::QueueRanks collectives::queue_ranks(SyncGroup& group, const QueueOptions& options) {
  const WaitOptions waits = {.timeout = options.waits.timeout, .stop = options.waits.stop, .phase = "queue: making it"};
  const bool has_outside = !options.outside_writer.empty();
  agree(group, options, has_outside, waits);
  check(options, group.size(), has_outside);
  if (!SharedBlocks::can_be(sync::inside(group)))
    throw Error(ErrorKind::unsupported, "a queue needs ranks that share memory, on one host");
  if (!has_outside) return {group.duplicate(waits), options.writer};
  const Handle handle = parsed(options.outside_writer);
  if (handle.ranks != group.size())
    throw Error(ErrorKind::argument,
                fmt::format("the queue's handle is for {} ranks, the group has {}", handle.ranks, group.size()));
  std::vector<int> numbers(static_cast<std::size_t>(group.size()));
  for (std::size_t rank = 0; rank < numbers.size(); ++rank) numbers[rank] = group.info(static_cast<int>(rank)).rank;
  QueueRanks met;
  // Rank 0 waits for all that time, and then tells the others why it gives up.
  WaitOptions longer = waits;
  longer.timeout = sync::timeout_of(waits, group) + std::chrono::seconds(10);
  sync::inside(group).together(
      longer, [&] { met = meet(handle, group.rank(), std::move(numbers), group.timeout(), options, waits); });
  return met;
}

collectives::QueueRanks collectives::queue_ranks_from_outside(const QueueOptions& options) {
  const Handle handle = parsed(options.outside_writer);
  check(options, handle.ranks, true);
  std::vector<int> numbers(static_cast<std::size_t>(handle.ranks));
  std::iota(numbers.begin(), numbers.end(), 0);
  return meet(handle, handle.ranks, std::move(numbers), sync::default_timeout(), options,
              {.timeout = options.waits.timeout, .stop = options.waits.stop, .phase = "queue: making it"});
}

}  // namespace muster
