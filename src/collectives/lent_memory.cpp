// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/lent_memory.hpp"

#include <algorithm>
#include <utility>

#include "muster/error.hpp"

namespace muster::collectives {
namespace {

// Beyond so many that no rank holds, the smallest goes.
constexpr std::size_t most_unused = 4;

}  // namespace

void Loan::withdraw() noexcept {
  for (const shm::LeaseId lease : leases) segment->withdraw(lease);
  leases.clear();
}

LentMemory::LentMemory(sync::Group& group, int owner, os::Access access)
    : group_(group), owner_(owner), access_(access) {
  for (int rank = 0; rank < group.size(); ++rank)
    holders_.push_back(rank == group.rank() ? nullptr : group.liveness(rank));
}

Loan LentMemory::lend(std::uint64_t bytes, std::span<const int> ranks) {
  const std::shared_ptr<shm::OwnedSegment>* fits = nullptr;
  const std::shared_ptr<shm::OwnedSegment>* smallest = nullptr;
  std::size_t unused = 0;
  for (const auto& each : own_) {
    if (each->is_lent()) continue;
    ++unused;
    if (smallest == nullptr || each->capacity() < (*smallest)->capacity()) smallest = &each;
    if (each->capacity() >= bytes && (fits == nullptr || each->capacity() < (*fits)->capacity())) fits = &each;
  }
  Loan loan;
  loan.leases.reserve(ranks.size());
  if (fits != nullptr) {
    loan.segment = *fits;
  } else {
    if (unused >= most_unused) own_.erase(own_.begin() + (smallest - own_.data()));
    loan.segment = own_.emplace_back(std::make_shared<shm::OwnedSegment>(std::max<std::uint64_t>(bytes, 4096)));
  }
  // A lease a rank; their stamps are one after another. This rank's own is held as the others' are.
  for (const int rank : ranks)
    loan.leases.push_back(
        loan.segment->offer(static_cast<std::uint32_t>(rank), holders_[static_cast<std::size_t>(rank)]));
  loan.offer = {loan.segment->place(), loan.leases.empty() ? 0 : loan.leases.front().stamp};
  return loan;
}

HeldResult LentMemory::take(const ResultOffer& offer, std::size_t at, std::uint64_t bytes) {
  std::shared_ptr<shm::RemoteSegment>& segment = mapped_[offer.place];
  if (!segment) {
    std::erase_if(mapped_, [](const auto& each) {
      return each.second != nullptr && each.second->header().retired.load(std::memory_order_acquire) != 0;
    });
    const auto region = owner_ == group_.rank() ? sync::Region::own() : group_.region_of(owner_);
    segment = std::make_shared<shm::RemoteSegment>(*region, offer.place, access_);
  }
  if (bytes > segment->capacity()) throw Error(ErrorKind::corrupt, "lent memory has not the room that it needs");
  // Stamps may run over, as those of an offer do.
  const std::uint64_t stamp = (offer.first_stamp - 1 + at) % ((1U << 30) - 1) + 1;
  auto lease = std::make_shared<shm::Lease>(
      segment, shm::LeaseId{static_cast<std::uint32_t>(group_.rank()), static_cast<std::uint32_t>(stamp)});
  return {segment->mapping().data(), std::move(lease)};
}

}  // namespace muster::collectives
