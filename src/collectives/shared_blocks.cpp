// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/shared_blocks.hpp"

namespace muster::collectives {

bool SharedBlocks::can_be(const sync::Group& group) {
  if (static_cast<std::size_t>(group.size()) > shm::lease_words) return false;
  for (int rank = 0; rank < group.size() && group.size() > 1; ++rank)
    if (group.host_of(rank) != group.host_of(0) || group.region_of(rank) == nullptr) return false;
  return true;
}

SharedBlocks::SharedBlocks(sync::Group& group, std::uint64_t bytes, const WaitOptions& options)
    : blocks_(static_cast<std::size_t>(group.size())) {
  struct Offer {
    std::uint64_t place = 0;  // 0: no block
    std::uint64_t first_stamp = 0;
  };
  Offer mine;
  std::vector<Offer> offers(blocks_.size());
  const auto self = static_cast<std::size_t>(group.rank());
  group.together(options, [&] {
    if (bytes == 0) return;
    own_ = std::make_unique<shm::OwnedSegment>(bytes);
    blocks_[self] = own_->data();
    mine.place = own_->place();
    // One lease a rank; their stamps are one after another.
    for (int rank = 0; rank < group.size(); ++rank)
      if (rank != group.rank()) offered_.push_back(own_->offer(static_cast<std::uint32_t>(rank), group.liveness(rank)));
    if (!offered_.empty()) mine.first_stamp = offered_.front().stamp;
  });
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(offers)), options);
  group.together(options, [&] {
    for (std::size_t rank = 0; rank < blocks_.size(); ++rank) {
      const Offer& offer = offers[rank];
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
  // What nobody has taken, because the others have failed before.
  for (const shm::LeaseId lease : offered_) own_->withdraw(lease);
}

}  // namespace muster::collectives
