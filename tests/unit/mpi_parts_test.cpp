// SPDX-License-Identifier: Apache-2.0
// The components of the MPI route that can be tested without MPI: pieces, the pool, and the memory that a rank will
// need.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "src/collectives/engine.hpp"
#include "src/collectives/packed_config.hpp"
#include "src/core/checksum.hpp"
#include "src/core/descriptor.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/policy.hpp"
#include "src/multihost/buffer_pool.hpp"
#include "src/multihost/piece_length.hpp"
#include "src/multihost/pieces.hpp"
#include "src/os/pages.hpp"
#include "tests/support/idle_group.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::multihost;
using test::has;

namespace {

constexpr std::uint64_t MiB = 1 << 20;

std::vector<Placed> laid_out(const std::vector<std::uint64_t>& sizes) {
  std::vector<Placed> places;
  std::uint64_t at = 0;
  for (const std::uint64_t bytes : sizes) {
    places.push_back({at, bytes});
    at += (bytes + 63) / 64 * 64;
  }
  return places;
}

void check_covered(const std::vector<Placed>& places, const std::vector<MessagePiece>& pieces) {
  std::uint64_t end = 0;
  for (const MessagePiece& piece : pieces) {
    CHECK(piece.offset >= end);
    CHECK(piece.bytes > 0);
    CHECK(piece.count >= 1);
    end = piece.offset + piece.bytes;
  }
  for (const Placed& place : places) {
    std::uint64_t covered = 0;
    for (const MessagePiece& piece : pieces) {
      const std::uint64_t from = std::max(place.offset, piece.offset);
      const std::uint64_t to = std::min(place.offset + place.bytes, piece.offset + piece.bytes);
      if (from < to) covered += to - from;
    }
    CHECK(covered == place.bytes);
  }
}

std::vector<std::shared_ptr<std::byte>> take(BufferPool& pool, const std::vector<std::uint64_t>& sizes,
                                             std::uint64_t limit = UINT64_MAX) {
  std::vector<std::shared_ptr<std::byte>> buffers;
  for (const std::uint64_t size : sizes) buffers.push_back(pool.take(size, limit));
  return buffers;
}

/// Ranks alternate between two hosts.
/// The global ranks are 100, 101, ...
std::shared_ptr<const group::RankTable> infos_of(int size) {
  std::vector<RankInfo> infos(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) infos[static_cast<std::size_t>(rank)].global_rank = 100 + rank;
  return group::RankTable::make(std::move(infos));
}

class TwoHosts final : public test::IdleGroup {
 public:
  explicit TwoHosts(int size) : IdleGroup(0, infos_of(size)) {}
  [[nodiscard]] bool shares_memory(int rank) const override { return rank % 2 == 0; }
  [[nodiscard]] int host_of(int rank) const override { return rank % 2; }
  [[nodiscard]] std::shared_ptr<const group::PeerLiveness> liveness(int) const override { return nullptr; }
};

/// Returns records of one list of all ranks, each of which sends `bytes` to rank 0.
std::vector<gather::ExchangeRecord> records_of(int size, std::uint64_t bytes) {
  std::vector<gather::ExchangeRecord> records(static_cast<std::size_t>(size));
  for (std::size_t rank = 0; rank < records.size(); ++rank) {
    gather::ExchangeRecord& record = records[rank];
    record.operation = gather::GatherKind::tensors;
    record.list_hash = 7;
    record.list_length = static_cast<std::uint32_t>(size);
    record.position = static_cast<std::uint32_t>(rank);
    record.has_value = true;
    record.routes = gather::route_bit(Route::mpi);
    record.residency = gather::Residency::host;
    if (rank != 0) record.moving_bytes = bytes;
  }
  records.front().receives = true;
  records.front().room = UINT64_MAX;
  records.front().available_bytes = UINT64_MAX;
  return records;
}

std::uint64_t fresh_bytes_of(int rank, const gather::Records& records, const Group& group) {
  return gather::fresh_bytes_of(rank, gather::list_of(rank, records), records, group);
}

}  // namespace

TEST_CASE("small tensors share pieces, large ones are cut, empty ones have none") {
  CHECK(cut({}).empty());
  CHECK(cut(laid_out({0, 0})).empty());
  const auto small = laid_out(std::vector<std::uint64_t>(10000, 1000));
  const auto packed = cut(small);
  check_covered(small, packed);
  CHECK(packed.size() == 10);
  for (const MessagePiece& piece : packed) CHECK(piece.bytes <= packed_piece);
  const auto mixed = laid_out({10, 0, large_tensor - 1, large_tensor, 3 * cut_piece + 5, 7, 0, 9, 2 * cut_piece, 1});
  const auto pieces = cut(mixed);
  check_covered(mixed, pieces);
  CHECK(pieces.size() == 10);
  for (const MessagePiece& piece : pieces)
    if (mixed[piece.first].bytes >= large_tensor) CHECK(piece.count == 1);
  // More than an int can count.
  const auto huge = laid_out({(std::uint64_t{5} << 30) + 3});
  const auto many = cut(huge);
  check_covered(huge, many);
  CHECK(many.size() == 1281);
}

TEST_CASE("free memory is reused, cut and grown; the pool grows only by the missing bytes") {
  const auto pool = std::make_shared<BufferPool>();
  {
    const auto first = take(*pool, {10 * MiB, 0, 100});
    CHECK(pool->bytes() - pool->free_bytes() == 10 * MiB + 4096);
    CHECK(!first[1]);
  }
  CHECK(pool->bytes() == 10 * MiB + 4096);
  CHECK(pool->free_bytes() == pool->bytes());
  {
    const auto cut_up = take(*pool, {4 * MiB, 5 * MiB});
    CHECK(pool->bytes() == 10 * MiB + 4096);
    CHECK(cut_up[0].get() + 4 * MiB != cut_up[1].get() + 5 * MiB);
    std::fill_n(cut_up[0].get(), 4 * MiB, std::byte{1});
    std::fill_n(cut_up[1].get(), 5 * MiB, std::byte{2});
    CHECK(cut_up[0].get()[4 * MiB - 1] == std::byte{1});
  }
  for (int round = 0; round < 20; ++round) {
    const std::vector<std::uint64_t> sizes = {static_cast<std::uint64_t>(round % 7) * MiB + 5, 3 * MiB, 70000};
    const std::uint64_t before = pool->bytes();
    std::uint64_t needed = 0;
    for (const std::uint64_t size : sizes) needed += os::whole_pages(size, os::page_size());
    const std::uint64_t free = pool->free_bytes();
    const auto buffers = take(*pool, sizes);
    // A remainder of less than 64 KiB stays with its buffer.
    CHECK(pool->bytes() <= before + (needed - std::min(needed, free)) + sizes.size() * (64 << 10));
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      std::fill_n(buffers[i].get(), sizes[i], std::byte{4});
      CHECK(reinterpret_cast<std::uintptr_t>(buffers[i].get()) % 64 == 0);
    }
  }
  const std::uint64_t all = pool->bytes();
  CHECK(pool->trim(0) == all);
  CHECK(pool->bytes() == 0);
}

TEST_CASE("a pool keeps no more than its limit, and its buffers outlive it") {
  auto pool = std::make_shared<BufferPool>();
  auto kept = take(*pool, {3 * MiB, 2 * MiB}, MiB);
  CHECK(pool->bytes() == 5 * MiB);
  kept.pop_back();
  CHECK(pool->bytes() == 3 * MiB);
  pool.reset();
  std::fill_n(kept.front().get(), 3 * MiB, std::byte{3});
  kept.clear();
  pool = std::make_shared<BufferPool>();
  CHECK_THROWS_AS((void)take(*pool, {MiB, std::uint64_t{1} << 60}), Error);
  CHECK(pool->bytes() <= MiB);
}

TEST_CASE("a released part is the next one, and gives a credit, on any thread") {
  auto pool = std::make_shared<BufferPool>();
  const auto credits = std::make_shared<std::atomic<std::uint64_t>>(0);
  const auto part = [&] { return with_credit(take(*pool, {MiB}).front(), credits); };
  auto first = part();
  const std::byte* where = first.get();
  std::memset(first.get(), 1, MiB);
  std::shared_ptr<std::byte> kept = first;
  first.reset();
  CHECK(credits->load() == 0);
  CHECK(part().get() != where);
  CHECK(credits->load() == 1);
  CHECK(pool->bytes() == 2 * MiB);
  CHECK(pool->peak() == 2 * MiB);
  std::jthread([moved = std::move(kept)]() mutable { moved.reset(); }).join();
  CHECK(credits->load() == 2);
  auto again = part();
  CHECK(again.get() == where);
  pool.reset();
  std::memset(again.get(), 2, MiB);
  again.reset();
  CHECK(credits->load() == 3);
}

TEST_CASE("parts kept after a stream no longer count and are not reused") {
  const auto pool = std::make_shared<BufferPool>();
  auto kept = take(*pool, {MiB, MiB});
  kept.pop_back();
  CHECK(pool->settle() == MiB);
  CHECK(pool->bytes() == MiB);
  CHECK(pool->peak() == 0);
  kept.clear();
  CHECK(pool->bytes() == MiB);
  auto other = take(*pool, {MiB});
  CHECK(pool->settle() + pool->trim(0) == 0);
  other.clear();
  CHECK(pool->bytes() == 0);
  other = take(*pool, {2 * MiB});
  CHECK(pool->peak() == 2 * MiB);
}

TEST_CASE("a root needs memory for the data of other hosts, less the free bytes of its pool") {
  const TwoHosts group(4);
  auto records = records_of(4, 5000);
  CHECK(fresh_bytes_of(0, records, group) == 2 * 8192);
  CHECK(fresh_bytes_of(1, records, group) == 0);
  records.front().free = 8192;
  CHECK(fresh_bytes_of(0, records, group) == 8192);
  records.front().forced = Route::mpi;
  CHECK(fresh_bytes_of(0, records, group) == 2 * 8192);
  records.front().free = 1 << 20;
  CHECK(fresh_bytes_of(0, records, group) == 0);
}

TEST_CASE("memory is summed by host, a budget belongs to one rank") {
  using Reason = gather::Problem::Reason;
  const TwoHosts group(4);
  auto records = records_of(4, 4096);
  CHECK(!gather::find_problem(records, group));
  // Rank 2 sends over shared memory on the root's host. Ranks 1 and 3 are on the other host.
  records[2].fresh_bytes = 100;
  records[2].available_bytes = 8291;
  const auto memory = gather::find_problem(records, group);
  REQUIRE(memory);
  CHECK(memory->reason == Reason::memory);
  CHECK(memory->ranks == std::vector<int>{0, 2});
  records[2].available_bytes = 8292;
  CHECK(!gather::find_problem(records, group));
  records[1].fresh_bytes = 1000;
  records[1].available_bytes = 1000;
  CHECK(!gather::find_problem(records, group));
  // A sum past 64 bits is the largest number.
  records[1].fresh_bytes = UINT64_MAX;
  records[3].fresh_bytes = 1;
  const auto overflow = gather::find_problem(records, group);
  REQUIRE(overflow);
  CHECK(overflow->ranks == std::vector<int>{1, 3});
  CHECK(has(gather::make_error(*overflow, records, {}, group).what(),
            "needed 18446744073709551615 bytes (16.0 EiB) by 2 ranks"));
  records[1].fresh_bytes = records[3].fresh_bytes = 0;
  records.front().room = 8191;
  const auto budget = gather::find_problem(records, group);
  REQUIRE(budget);
  CHECK(budget->reason == Reason::budget);
  CHECK(budget->ranks == std::vector<int>{0});
}

TEST_CASE("the error of one rank is told as it is, and that of several with their number") {
  const TwoHosts group(4);
  const std::vector<gather::Words> words(4, gather::words_of(Error(ErrorKind::io, "the disk")));
  const auto text = [&](const std::vector<int>& failed) {
    return std::string(gather::failure_of(failed, words, group).what());
  };
  CHECK(text({2}).ends_with("the disk"));
  CHECK(text({1, 2}).ends_with("the disk (and 1 more rank failed)"));
  CHECK(text({1, 2, 3}).ends_with("the disk (and 2 more ranks failed)"));
}

TEST_CASE("the texts of ranks have global ranks") {
  const TwoHosts group(4);
  const std::vector<gather::Words> words(4, gather::words_of(std::string("text")));
  CHECK(gather::each_words(group, std::vector{1, 3}, words, ": ", 8) == "rank 101: text; rank 103: text");
  const auto records = records_of(4, 4096);
  const gather::Problem refused{
      gather::Problem::Reason::refused, {1, 2}, {.route = Route::shm, .refusal = gather::NoRouteReason::unfit}};
  CHECK(has(gather::make_error(refused, records, words, group).what(), "rank 101 can use: "));
  const gather::Problem calls{gather::Problem::Reason::operations, {0, 3}, {}};
  CHECK(has(gather::make_error(calls, records, words, group).what(), "rank 103 "));
}

TEST_CASE("tensors outside the bytes that another rank announced are refused") {
  // nullopt is a tensor in the slot.
  const auto refused = [](std::optional<core::TensorLocation> place, std::int64_t bytes) {
    const auto descriptor = core::encode_descriptor(Tensor::allocate(DType::u8, {100}), [&](auto&) { return place; });
    const Tensor memory = Tensor::allocate(DType::u8, {bytes});
    int corrupt = 0;
    const auto attempt = [&](const auto& take) {
      try {
        take();
      } catch (const Error& error) {
        corrupt += error.kind() == ErrorKind::corrupt;
      }
    };
    attempt([&] { collectives::unpacked(descriptor, memory); });
    attempt([&] {
      take_tree(1, descriptor, tensor_checksum(descriptor), static_cast<std::uint64_t>(bytes),
                {std::shared_ptr<void>(), memory.mutable_data()}, {});
    });
    return corrupt;
  };
  CHECK(refused(std::nullopt, 100) == 0);
  CHECK(refused(std::nullopt, 99) == 2);
  CHECK(refused(std::nullopt, 0) == 2);
  CHECK(refused(core::TensorLocation{1, 0}, 100) == 2);
  CHECK(refused(core::TensorLocation{7, 64}, 256) == 2);
}

TEST_CASE("a merge needs its result and a window that does not grow with the tensors") {
  const TwoHosts group(4);
  auto records = records_of(4, 1 << 30);
  for (gather::ExchangeRecord& record : records) {
    record.operation = gather::GatherKind::merge;
    record.moving_bytes = 1 << 30;
    record.merge = gather::merge_number(merge::concat(0));
  }
  const std::uint64_t window = gather::merge_window_bytes(3, 1 << 30);
  CHECK(window == 6 * gather::merge_piece_bytes(3, 1 << 30));
  CHECK(window <= 64 * MiB);
  CHECK(fresh_bytes_of(0, records, group) == 4 * (std::uint64_t{1} << 30) + window);
  for (gather::ExchangeRecord& record : records) record.merge = gather::merge_number(merge::sum());
  CHECK(fresh_bytes_of(0, records, group) == (std::uint64_t{1} << 30) + window);
  CHECK(gather::merge_window_bytes(3, 100) == 6 * 4096);
  CHECK(gather::merge_window_bytes(4095, 1 << 30) <= 128 * MiB);
  for (const std::size_t senders : {1, 2, 3, 7, 8, 511, 4095})
    CHECK(gather::merge_piece_bytes(senders, 1 << 30) % 4096 == 0);
}

TEST_CASE("more ranks on one host than fit into a chunk of shared memory are refused, on all ranks") {
  const auto group = std::make_shared<TwoHosts>(2 * collectives::most_ranks_on_host + 1);
  try {
    const collectives::Engine engine(group, {});
    FAIL("nothing was thrown");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::unsupported);
    CHECK(std::string(error.what()).find("more than 2048 ranks") != std::string::npos);
  }
}

TEST_CASE("pieces become short if long ones arrive slowly, and the speed is measured again") {
  using namespace std::chrono_literals;
  multihost::PieceLength length;
  multihost::PieceLength::Time now{1h};
  // Sends `bytes` in pieces over a link of some speed. At most four pieces are on their way.
  const auto send = [&](std::uint64_t bytes, double bytes_per_second) {
    struct Piece {
      multihost::PieceLength::Time arrives;
      std::uint64_t bytes;
    };
    std::deque<Piece> on_the_way;
    auto link_is_free = now;
    for (std::uint64_t sent = 0; sent < bytes; sent += on_the_way.back().bytes) {
      if (on_the_way.size() == 4) now = on_the_way.front().arrives;
      while (!on_the_way.empty() && on_the_way.front().arrives <= now) on_the_way.pop_front();
      std::uint64_t untaken = 0;
      for (const Piece& piece : on_the_way) untaken += piece.bytes;
      const std::size_t next = length.longest();
      length.before_sending(next, untaken, now);
      link_is_free += std::chrono::nanoseconds(static_cast<std::int64_t>(1e9 * double(next) / bytes_per_second));
      on_the_way.push_back({link_is_free, next});
    }
    now = link_is_free;
  };
  CHECK(length.longest() == multihost::long_piece);
  send(64 << 20, 500e6);
  CHECK(length.longest() == multihost::long_piece);
  // A pause of the program says nothing about the link.
  for (int i = 0; i < 100; ++i) length.before_sending(multihost::long_piece, 0, now += 300ms);
  CHECK(length.longest() == multihost::long_piece);
  send(32 << 20, 60e6);
  CHECK(length.longest() == multihost::short_piece);
  send(200 << 20, 110e6);
  CHECK(length.longest() == multihost::short_piece);
  send(60 << 20, 110e6);
  CHECK(length.longest() == multihost::long_piece);
  send(64 << 20, 500e6);
  CHECK(length.longest() == multihost::long_piece);
}
