// SPDX-License-Identifier: Apache-2.0
// Memory in one process: pages of any size, and arenas that are found by address while they are created and destroyed.

#include <atomic>
#include <thread>

#include "doctest/doctest.h"
#include "muster/error.hpp"
#include "muster/shared_arena.hpp"
#include "src/group/region.hpp"
#include "src/os/pages.hpp"
#include "src/shm/arena_core.hpp"

using namespace muster;

TEST_CASE("pages of 4 and 64 KiB: rounding, the pages around a range, and those inside it") {
  for (const std::uint64_t page : {std::uint64_t{4} << 10, std::uint64_t{64} << 10}) {
    CAPTURE(page);
    CHECK(os::whole_pages(0, page) == 0);
    CHECK(os::whole_pages(1, page) == page);
    CHECK(os::whole_pages(page, page) == page);
    CHECK(os::whole_pages(page + 1, page) == 2 * page);
    CHECK(os::whole_pages(UINT64_MAX, page) == UINT64_MAX - page + 1);
    const std::uint64_t at = 10 * page;
    // A segment's data begins 4 KiB after the segment, which is inside a page of 64 KiB.
    CHECK(os::pages_around({at + 4096, at + page}, page).begin == (page == 4096 ? at + 4096 : at));
    CHECK(os::pages_around({at, at + 1}, page) == os::AddressRange{at, at + page});
    CHECK(os::pages_around({at + page - 1, at + page + 1}, page) == os::AddressRange{at, at + 2 * page});
    CHECK(os::pages_within({at, at + page}, page) == os::AddressRange{at, at + page});
    CHECK(os::pages_within({at + 1, at + 2 * page + 1}, page) == os::AddressRange{at + page, at + 2 * page});
    const os::AddressRange none = os::pages_within({at + 1, at + page - 1}, page);
    CHECK(none.begin == none.end);
  }
  const os::PrivateMemory memory(1);
  CHECK(memory.size() == os::page_size());
}

TEST_CASE("a region hands out offsets up to its last byte, and then none") {
  group::Region region(os::Backing::anonymous);
  const std::uint64_t page = os::page_size();
  const std::uint64_t first = region.take(1);
  CHECK(first >= page);  // 0 means no offset
  CHECK(region.take(page) == first + page);
  CHECK(region.take(page + 1) == first + 2 * page);
  const std::uint64_t last = region.take(region.room() - page - 1);
  CHECK(last == first + 4 * page);
  CHECK(region.room() == page);
  CHECK_THROWS_AS(region.check(page + 1), Error);
  CHECK_THROWS_AS(static_cast<void>(region.take(page + 1)), Error);
  CHECK(region.take(page) == region.size() - page);
  CHECK(region.room() == 0);
  CHECK_THROWS_AS(static_cast<void>(region.take(1)), Error);
}

TEST_CASE("an arena that is destroyed while its address is looked up does not stop the process") {
  std::atomic<bool> is_over{false};
  std::atomic<const std::byte*> somewhere{nullptr};
  // Looks for more bytes than exist, so nothing is found or kept alive.
  std::thread looks([&] {
    while (!is_over) (void)detail::ArenaCore::find(somewhere, UINT64_MAX);
  });
  for (int i = 0; i < 1000; ++i) {
    SharedArena arena(4096);
    somewhere = arena.allocate(DType::u8, {1}).data();
  }
  is_over = true;
  looks.join();
  CHECK(!detail::ArenaCore::find(somewhere, 1));
}
