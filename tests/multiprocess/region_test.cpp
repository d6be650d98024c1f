// SPDX-License-Identifier: Apache-2.0
// Shared memory that ranks pass to each other by its offset. It exists exactly as long as a rank maps it.

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <map>
#include <thread>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "muster/process_group.hpp"
#include "muster/shared_arena.hpp"
#include "src/collectives/backend.hpp"
#include "src/group/control_block.hpp"
#include "src/os/pages.hpp"
#include "src/shm/segment.hpp"
#include "src/shm/window_ring.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/reassembly.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;
namespace fs = std::filesystem;

namespace {

constexpr std::int64_t elements = 4 << 20;
constexpr std::uint64_t a_few_pages = 256 << 10;

struct Regions {
  std::size_t count = 0;
  std::uint64_t bytes = 0;  // in memory that they have mapped
};

/// The regions that this process has open.
Regions open_regions() {
  std::map<ino_t, std::uint64_t> bytes;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (!fs::read_symlink(entry, gone).string().starts_with("/memfd:muster")) continue;
    struct stat status {};
    if (::stat(entry.path().c_str(), &status) == 0)
      bytes[status.st_ino] = static_cast<std::uint64_t>(status.st_blocks) * 512;
  }
  Regions all{bytes.size(), 0};
  for (const auto& [inode, size] : bytes) all.bytes += size;
  return all;
}

Tensor tensor_of(int rank) {
  return pattern(DType::u8, {elements}, static_cast<std::uint64_t>(rank) + 1);
}

bool is_whole(const GatheredTensors& all) {
  return bitwise_equal(*all[1], tensor_of(1));
}

}  // namespace

TEST_CASE("memory that the root holds outlives the group or arena of its sender, and is freed with its last owner") {
  for (const bool lends : {false, true}) {
    CAPTURE(lends);
    run_ranks(2, [lends](Group& group) {
      auto copy = group.duplicate();
      std::optional<SharedArena> arena;
      Tensor mine = tensor_of(group.rank());
      if (lends && group.rank() == 1) {
        arena.emplace(8 << 20);
        const Tensor lent = arena->allocate(DType::u8, {elements});
        std::ranges::copy(mine.bytes(), lent.mutable_data());
        mine = lent;
      }
      GatheredTensors all = get_tensors_parallel(mine, std::vector{0, 1}, *copy);
      mine = {};
      if (group.rank() == 1) {
        all = {};
        copy.reset();
        arena.reset();
      }
      group.barrier();
      if (group.rank() == 0) {
        RANK_CHECK(is_whole(all));
        RANK_CHECK(open_regions().bytes >= elements);
        all = {};
        RANK_CHECK(open_regions().bytes < a_few_pages);
      }
      group.barrier();
    });
  }
}

TEST_CASE("memory held of a killed rank stays valid, and no other process keeps that rank's memory open") {
  for (const bool is_seen_by_barrier : {false, true}) {
    CAPTURE(is_seen_by_barrier);
    const auto body = [&](Group& group) {
      const Tensor mine = tensor_of(group.rank());
      GatheredTensors all = get_tensors_parallel(mine, std::vector{0, 1}, group);
      const Regions before = open_regions();
      if (group.rank() == 1) ::raise(SIGKILL);
      if (is_seen_by_barrier) error_of(ErrorKind::peer_lost, {}, [&] { group.barrier(); });
      error_of(ErrorKind::peer_lost, {}, [&] { (void)get_tensors_parallel(mine, std::vector{0, 1}, group); });
      RANK_CHECK(is_whole(all));
      all = {};
      RANK_CHECK(open_regions().count == before.count - 1);
    };
    run_ranks(2, body, {1});
  }
}

TEST_CASE("memory held by a killed root is returned: in a stream, and after its sender's group") {
  for (const bool is_stream : {true, false}) {
    CAPTURE(is_stream);
    const GroupOf two(2);
    run_processes(2, {0}, [&](int rank) {
      const auto group = two.join(rank);
      const auto stream = [&] {
        gather_each([&]() -> std::optional<Config> { return tensor_of(rank); }, std::vector{0, 1}, *group,
                    [](LayerPart& part) {
                      if (part.layer == 3) ::raise(SIGKILL);
                    });
      };
      if (is_stream) {
        RANK_CHECK(error_of(stream).kind() == ErrorKind::peer_lost);
      } else {
        auto copy = group->duplicate();
        GatheredTensors all = get_tensors_parallel(tensor_of(rank), std::vector{0, 1}, *copy);
        if (rank == 1) all = {};
        copy.reset();
        group->barrier();
        if (rank == 0) ::raise(SIGKILL);
        RANK_CHECK(open_regions().bytes >= elements);
        RANK_CHECK(error_of([&] { group->barrier(); }).kind() == ErrorKind::peer_lost);
      }
      // A process that allocates shared memory looks for returned memory.
      const SharedArena arena(1000);
      RANK_CHECK(open_regions().bytes < a_few_pages);
    });
  }
}

TEST_CASE("failed streams keep nothing of an arena leased") {
  run_ranks(2, [](Group& group) {
    SharedArena arena(1 << 20);
    const auto source = [&]() -> std::optional<Config> { return arena.allocate(DType::u8, {100000}); };
    for (int i = 0; i < 20; ++i)
      error_of(ErrorKind::io, {"enough"}, [&] {
        gather_each(source, std::vector{0, 1}, group, [](LayerPart&) { throw Error(ErrorKind::io, "enough"); });
      });
    RANK_CHECK(arena.waiting_for_leases() == 0);
    (void)arena.allocate(DType::u8, {1000000});
  });
}

TEST_CASE("groups and operations, created and destroyed, leave nothing in shared memory") {
  run_ranks(2, [](Group& group) {
    const auto once = [&](std::int64_t size) {
      const auto copy = group.duplicate();
      const Tensor mine = pattern(DType::u8, {size}, 1);
      (void)get_tensors_parallel(mine, std::vector{0, 1}, *copy);
      (void)merge_tensor_parallel(mine, merge::concat(0), std::vector{0, 1}, *copy);
      gather_each(layers_of(3, [&](std::uint64_t) { return mine; }), std::vector{0, 1}, *copy, [](LayerPart&) {});
    };
    once(1000);
    group.barrier();
    const std::uint64_t before = open_regions().bytes;
    // Each is larger than the one before, so none can reuse a slot.
    for (int i = 1; i <= 50; ++i) once(i * 100000);
    group.barrier();
    RANK_CHECK(open_regions().bytes < before + a_few_pages);
    group.barrier();
  });
}

TEST_CASE("an offset without a segment is an error") {
  const auto region = group::Region::own();
  const shm::OwnedSegment segment(1 << 20);
  CHECK(shm::RemoteSegment(*region, segment.place()).capacity() == 1 << 20);
  for (const std::uint64_t place : {std::uint64_t{0}, std::uint64_t{1}, segment.place() + 4096,
                                    segment.place() + (1 << 20) + (1 << 16), region->size() - 4096, UINT64_MAX - 4095})
    words_of(ErrorKind::corrupt, [&] { const shm::RemoteSegment other(*region, place); });
  // Values that a peer could write into its own header.
  for (const std::uint64_t capacity : {std::uint64_t{0}, region->size(), UINT64_MAX}) {
    segment.header().capacity = capacity;
    CHECK_THROWS_AS(shm::RemoteSegment(*region, segment.place()), Error);
  }
}

TEST_CASE("an offset without a ring of windows is an error") {
  const auto region = group::Region::own();
  const shm::WindowRing ring(2, 1 << 16, 2);
  CHECK(shm::WindowRing(*region, ring.place()).window_bytes() == 1 << 16);
  const auto refused = [&](std::uint64_t place, std::string_view part) {
    CHECK(has(words_of(ErrorKind::corrupt, [&] { const shm::WindowRing other(*region, place); }), part));
  };
  for (const std::uint64_t place : {std::uint64_t{1}, region->size() - os::page_size() + 1, region->size(), UINT64_MAX})
    refused(place, "outside the shared memory of its sender");
  // There are only zeros.
  for (const std::uint64_t place : {ring.place() + 4096, region->size() - os::page_size()})
    refused(place, "buffers that its sender does not have");
  // Values that a peer could write into its own header.
  struct Header {
    std::uint64_t magic;
    std::uint64_t window_bytes;
    std::uint32_t depth;
    std::uint32_t users;
  };
  const os::Mapping mapping(*region->memory(), os::Access::read_write, ring.place(), sizeof(Header));
  auto& header = *reinterpret_cast<Header*>(mapping.data());
  const Header good = header;
  for (const Header& bad :
       {Header{good.magic + 1, 1 << 16, 2, good.users}, Header{good.magic, 1 << 16, ring.most_depth + 1, good.users},
        Header{good.magic, (region->size() - ring.place()) / 2, 2, good.users},
        Header{good.magic, UINT64_MAX / 2 + 1, 2, good.users}}) {
    header = bad;
    refused(ring.place(), "buffers that its sender does not have");
  }
  header = {good.magic, 1 << 16, 0, good.users};
  CHECK(shm::WindowRing(*region, ring.place()).window_bytes() == 0);
}

TEST_CASE("a malformed card of a collective fails the group on all ranks") {
  using namespace collectives;
  using Call = void (*)(Backend&, CallSummary&, const Opened&);
  static std::vector<std::byte> data(8192);
  const Call all_to_all = [](Backend& backend, CallSummary& card, const Opened& opened) {
    backend.all_to_all(card, opened, std::vector<Bytes>(3), std::vector<Room>(3), {});
  };
  const Call all_gather = [](Backend& backend, CallSummary& card, const Opened& opened) {
    backend.all_gather(card, opened, {}, std::vector<Room>(3), {});
  };
  const Call reduce = [](Backend& backend, CallSummary& card, const Opened& opened) {
    card.bytes = 64;
    backend.all_reduce(card, opened, merge::Combine::sum, DType::u8, Bytes(data).first(64), Room(data).first(64), {});
  };
  const Call reduce_shared = [](Backend& backend, CallSummary& card, const Opened& opened) {
    card.bytes = data.size();
    (void)backend.all_reduce_shared(card, opened, merge::Combine::sum, DType::u8, data, {});
  };
  const auto ignore = [](std::span<const CallSummary>) {};
  run_ranks(3, [&](Group& group) {
    const shm::OwnedSegment small(4096);
    const shm::OwnedSegment enough(data.size());
    struct Forgery {
      std::string words;
      int by = 1;
      Call others = nullptr;
      CallHead head = {};
      InputPlace input = {};
      ResultOffer result = {};
    };
    for (const Forgery& each : {
             Forgery{"pieces that exceed a chunk", 1, all_gather, {.piece = 0}},
             Forgery{"pieces that exceed a chunk", 1, all_gather, {.piece = (128 << 10) + 1}},
             Forgery{"outside the shared memory of its sender", 1, reduce, {.bytes = 64}, {1, 0}},
             Forgery{"outside the arena of its sender", 1, reduce, {.bytes = 64}, {small.place(), 4096 - 63}},
             Forgery{"outside the arena of its sender", 1, reduce, {.bytes = 64}, {small.place(), UINT64_MAX - 63}},
             Forgery{"a loaned buffer is too small", 0, reduce_shared, {}, {}, {small.place(), 1}},
             Forgery{"not offered for a lease", 0, reduce_shared, {}, {}, {enough.place(), 7}},
         }) {
      const auto copy = group.duplicate();
      const auto backend = shared_backend(group::inside(*copy), {});
      CallSummary card;
      const bool is_forger = group.rank() == each.by;
      if (is_forger) {
        static_cast<CallHead&>(card) = each.head;
        card.input = each.input;
        card.result = each.result;
      }
      error_of(ErrorKind::corrupt, {each.words}, [&] {
        (is_forger ? all_to_all : each.others)(*backend, card, ignore);
        copy->barrier();
      });
    }
    // Extents and bytes of an all_gatherv. The sums of the first pair would agree.
    for (const auto& [extent, bytes] :
         {std::pair<std::int64_t, std::uint64_t>{-1, UINT64_MAX - 3}, {6, 20}, {INT64_MAX, 20}}) {
      const std::vector<std::string> words = {"another number of bytes than their sizes have"};
      if (group.rank() != 1) {
        ProcessGroup all(group);
        const auto gather = [&] { (void)all.all_gatherv(pattern(DType::f32, {5}, 1)); };
        error_of(ErrorKind::io, {"not yet"}, gather);
        error_of(ErrorKind::corrupt, words, gather);
        continue;
      }
      const auto copy = group.duplicate();
      const auto backend = shared_backend(group::inside(*copy), {});
      CallSummary card;
      card.status = 1;
      const auto learn = [&](std::span<const CallSummary> cards) {
        card.agreed = cards[0].agreed;
        group::inside(*copy).agree(Error(ErrorKind::io, "not yet"), {});
      };
      error_of(ErrorKind::io, {"not yet"}, [&] { all_to_all(*backend, card, learn); });
      card.status = 0;
      card.extent = extent;
      card.bytes = bytes;
      error_of(ErrorKind::corrupt, words, [&] {
        all_to_all(*backend, card, ignore);
        copy->barrier();
      });
    }
    group.barrier();
  });
}

TEST_CASE("a control block of another layout is refused as another version") {
  const auto region = group::Region::shared(os::Backing::anonymous);
  const auto block = group::ControlBlock::create(*region, 3);
  CHECK_NOTHROW(group::ControlBlock::open(*region, block->place(), 3));
  block->header().layout = 8;  // the number of ranks, in a build without this number
  const std::string words =
      words_of(ErrorKind::version, [&] { group::ControlBlock::open(*region, block->place(), 3); });
  const std::string own = "layout " + std::to_string(group::group_layout);
  for (const std::string& part :
       {std::string("layout 8"), own, std::string("Install the same version of Muster on all hosts")})
    CHECK_MESSAGE(words.find(part) != std::string::npos, words);
}

TEST_CASE(
    "the memory of a group is freed by the last ranks that leave at the same time, although another rank has died") {
  const pid_t dead = ::fork();
  if (dead == 0) ::_exit(0);
  const auto pidfd = std::make_shared<const os::Fd>(os::open_pidfd(dead));
  REQUIRE(::waitpid(dead, nullptr, 0) == dead);
  for (int turn = 0; turn < 400; ++turn) {
    const auto region = group::Region::shared(os::Backing::anonymous);
    const auto block = group::ControlBlock::create(*region, 3);
    group::Peers peers;
    peers.ranks = group::RankTable::make(std::vector<RankInfo>(3));
    peers.pidfds = {nullptr, nullptr, pidfd};
    std::atomic<int> ready{0};
    const auto leave = [&](int rank) {
      ++ready;
      while (ready != 2) continue;
      block->leave(rank, peers);
    };
    std::thread other([&] { leave(1); });
    leave(0);
    other.join();
    struct stat status {};
    REQUIRE(::fstat(region->memory()->get(), &status) == 0);
    // The first page of the region remains.
    REQUIRE(static_cast<std::uint64_t>(status.st_blocks) * 512 <= os::page_size());
  }
}
