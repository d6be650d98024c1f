// SPDX-License-Identifier: Apache-2.0
// Memory of the first rank for parts of a stream: one size, used again, and a credit for every buffer that comes back.

#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "src/mpi/part_pool.hpp"

using namespace muster::mpi;

namespace {

constexpr std::uint64_t size = 64 << 10;

Credits no_credits() {
  return std::make_shared<std::atomic<std::uint64_t>>(0);
}

}  // namespace

TEST_CASE("a buffer that nobody holds is the next one, and gives a credit") {
  const auto pool = std::make_shared<PartPool>();
  pool->set_size(size);
  const Credits credits = no_credits();
  auto first = pool->take(credits);
  const std::byte* where = first.get();
  std::memset(first.get(), 1, size);
  const std::shared_ptr<std::byte> kept = first;
  first.reset();
  CHECK(credits->load() == 0);
  const auto second = pool->take(credits);
  CHECK(second.get() != where);
  CHECK(pool->bytes() == 2 * size);
  auto moved = kept;
  CHECK(pool->peak() == 2 * size);
  std::jthread([&credits, copy = std::move(moved)]() mutable { copy.reset(); }).join();
  CHECK(credits->load() == 0);  // `kept` still has it
}

TEST_CASE("the last owner may be on any thread, and may outlive the pool") {
  auto pool = std::make_shared<PartPool>();
  pool->set_size(size);
  const Credits credits = no_credits();
  auto buffer = pool->take(credits);
  const std::byte* where = buffer.get();
  std::jthread([moved = std::move(buffer)]() mutable { moved.reset(); }).join();
  CHECK(credits->load() == 1);
  auto again = pool->take(credits);
  CHECK(again.get() == where);
  CHECK(pool->bytes() == size);
  pool.reset();
  std::memset(again.get(), 2, size);
  again.reset();
  CHECK(credits->load() == 2);
}

TEST_CASE("what is kept beyond a stream no longer counts and does not come back; another size starts anew") {
  const auto pool = std::make_shared<PartPool>();
  pool->set_size(size);
  const Credits credits = no_credits();
  auto kept = pool->take(credits);
  auto given_back = pool->take(credits);
  given_back.reset();
  CHECK(pool->settle() == size);
  CHECK(pool->bytes() == size);
  kept.reset();
  CHECK(credits->load() == 2);
  CHECK(pool->bytes() == size);
  auto other = pool->take(credits);
  pool->set_size(2 * size);
  CHECK(pool->bytes() == 0);
  other.reset();
  CHECK(pool->bytes() == 0);
  CHECK(pool->take(credits) != nullptr);
  CHECK(pool->peak() == 2 * size);
  CHECK(pool->trim() == 2 * size);
  CHECK(pool->trim() == 0);
}
