// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/shared_buffers.hpp"

#include <algorithm>
#include <utility>

#include "muster/error.hpp"

namespace muster::collectives {
namespace {

// If there are more unused segments, the smallest one is freed.
constexpr std::size_t most_unused = 4;

}  // namespace

void Loan::withdraw() noexcept {
  for (const shm::LeaseId lease : leases) segment->withdraw(lease);
  leases.clear();
}

LentMemory::LentMemory(group::BaseGroup& group, int owner, os::Access access)
    : group_(group), owner_(owner), access_(access) {
  for (int rank = 0; rank < group.size(); ++rank)
    holders_.push_back(rank == group.rank() ? nullptr : group.liveness(rank));
}

template <class IsUnused>
std::shared_ptr<shm::OwnedSegment> LentMemory::smallest_unused(std::uint64_t bytes, const IsUnused& is_unused) const {
  std::shared_ptr<shm::OwnedSegment> smallest;
  for (const auto& each : own_)
    if (each->capacity() >= bytes && (!smallest || each->capacity() < smallest->capacity()) && is_unused(*each))
      smallest = each;
  return smallest;
}

Loan LentMemory::lend(std::uint64_t bytes, std::span<const int> ranks) {
  Loan loan;
  loan.leases.reserve(ranks.size());
  const auto is_given_back = [](const shm::OwnedSegment& each) { return each.is_given_back(); };
  loan.segment = smallest_unused(bytes, is_given_back);
  // This check needs a system call, which finds out whether ranks that still hold a lease are dead.
  if (!loan.segment) loan.segment = smallest_unused(bytes, [](auto& each) { return !each.is_lent(); });
  if (!loan.segment) {
    const auto unused = std::ranges::count_if(own_, [&](const auto& each) { return is_given_back(*each); });
    if (static_cast<std::size_t>(unused) >= most_unused) std::erase(own_, smallest_unused(0, is_given_back));
    loan.segment = own_.emplace_back(std::make_shared<shm::OwnedSegment>(std::max<std::uint64_t>(bytes, 4096)));
  }
  // One lease per rank, with consecutive stamps. This rank holds a lease like the others.
  for (const int rank : ranks)
    loan.leases.push_back(
        loan.segment->offer(static_cast<std::uint32_t>(rank), holders_[static_cast<std::size_t>(rank)]));
  loan.offer = {loan.segment->place(), loan.leases.empty() ? 0 : loan.leases.front().stamp};
  return loan;
}

HeldResult LentMemory::take(const ResultOffer& offer, std::size_t at, std::uint64_t bytes) {
  const std::shared_ptr<shm::RemoteSegment> segment = mapped_.at(group_, owner_, offer.place, access_);
  if (bytes > segment->capacity()) throw Error(ErrorKind::corrupt, "malformed message: a loaned buffer is too small");
  // Stamps wrap around, as those of an offer do.
  const std::uint64_t stamp = (offer.first_stamp - 1 + at) % ((1U << 30) - 1) + 1;
  auto lease = std::make_shared<shm::Lease>(
      segment, shm::LeaseId{static_cast<std::uint32_t>(group_.rank()), static_cast<std::uint32_t>(stamp)});
  return {segment->mapping().data(), std::move(lease)};
}

bool SharedBlocks::can_be(const group::BaseGroup& group) {
  if (static_cast<std::size_t>(group.size()) > shm::lease_words) return false;
  for (int rank = 0; rank < group.size() && group.size() > 1; ++rank)
    if (group.host_of(rank) != group.host_of(0) || group.region_of(rank) == nullptr) return false;
  return true;
}

SharedBlocks::SharedBlocks(group::BaseGroup& group, std::uint64_t bytes, const WaitOptions& options)
    : blocks_(static_cast<std::size_t>(group.size())) {
  ResultOffer mine;  // place 0 means no block
  std::vector<ResultOffer> offers(blocks_.size());
  const auto self = static_cast<std::size_t>(group.rank());
  group.together(options, [&] {
    if (bytes == 0) return;
    own_ = std::make_unique<shm::OwnedSegment>(bytes);
    blocks_[self] = own_->data();
    mine.place = own_->place();
    // One lease per rank, with consecutive stamps.
    for (int rank = 0; rank < group.size(); ++rank)
      if (rank != group.rank()) offered_.push_back(own_->offer(static_cast<std::uint32_t>(rank), group.liveness(rank)));
    if (!offered_.empty()) mine.first_stamp = offered_.front().stamp;
  });
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(offers)), options);
  group.together(options, [&] {
    for (std::size_t rank = 0; rank < blocks_.size(); ++rank) {
      const ResultOffer& offer = offers[rank];
      if (rank == self || offer.place == 0) continue;
      const auto segment = std::make_shared<shm::RemoteSegment>(*group.region_of(static_cast<int>(rank)), offer.place,
                                                                os::Access::read_write);
      const std::uint64_t before = self - (self > rank ? 1 : 0);
      leases_.push_back(std::make_unique<shm::Lease>(
          segment,
          shm::LeaseId{static_cast<std::uint32_t>(self), static_cast<std::uint32_t>(offer.first_stamp + before)}));
      blocks_[rank] = segment->mapping().data();
    }
  });
}

SharedBlocks::~SharedBlocks() {
  // Some leases have not been taken, if the other ranks failed before.
  for (const shm::LeaseId lease : offered_) own_->withdraw(lease);
}

}  // namespace muster::collectives
