// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/shared_results.hpp"

#include <algorithm>
#include <utility>

#include "muster/error.hpp"
#include "src/shm/arena_core.hpp"

namespace muster::collectives {
namespace {

// Beyond so many that no rank holds, the smallest goes.
constexpr std::size_t most_unused = 4;

}  // namespace

SharedResults::SharedResults(sync::Group& group) : group_(group) {
  for (int rank = 0; rank < group.size(); ++rank)
    holders_.push_back(rank == group.rank() ? nullptr : group.liveness(rank));
}

SharedResults::~SharedResults() {
  // What nobody has taken, because the call has failed before.
  for (const auto& [segment, lease] : offered_) segment->withdraw(lease);
}

template <class IsUnused>
std::shared_ptr<shm::OwnedSegment> SharedResults::smallest_unused(std::uint64_t bytes, const IsUnused& is_unused) {
  std::shared_ptr<shm::OwnedSegment> smallest;
  for (const auto& each : own_)
    if (each->capacity() >= bytes && (!smallest || each->capacity() < smallest->capacity()) && is_unused(*each))
      smallest = each;
  return smallest;
}

ResultOffer SharedResults::offer(std::uint64_t bytes) {
  for (const auto& [segment, lease] : offered_) segment->withdraw(lease);
  offered_.clear();
  std::shared_ptr<shm::OwnedSegment> chosen = smallest_unused(bytes, [](auto& each) { return each.is_given_back(); });
  // Whether ranks that still hold something are dead costs a call of the kernel.
  if (!chosen) chosen = smallest_unused(bytes, [](auto& each) { return !each.is_lent(); });
  if (!chosen) {
    const auto is_unused = [](const auto& each) { return each->is_given_back(); };
    if (static_cast<std::size_t>(std::ranges::count_if(own_, is_unused)) >= most_unused)
      std::erase(own_, smallest_unused(0, [](auto& each) { return each.is_given_back(); }));
    chosen = own_.emplace_back(std::make_shared<shm::OwnedSegment>(std::max<std::uint64_t>(bytes, 4096)));
  }
  ResultOffer offer{chosen->place(), 0};
  // A lease a rank; their stamps are one after another. This rank's own is held as the others' are.
  for (int rank = 0; rank < group_.size(); ++rank) {
    const shm::LeaseId lease =
        chosen->offer(static_cast<std::uint32_t>(rank), holders_[static_cast<std::size_t>(rank)]);
    if (rank == 0) offer.first_stamp = lease.stamp;
    offered_.emplace_back(chosen.get(), lease);
  }
  return offer;
}

HeldResult SharedResults::take(const ResultOffer& offer, std::uint64_t bytes) {
  std::shared_ptr<shm::RemoteSegment>& segment = mapped_[offer.place];
  if (!segment) {
    std::erase_if(mapped_, [](const auto& each) {
      return each.second != nullptr && each.second->header().retired.load(std::memory_order_acquire) != 0;
    });
    segment = std::make_shared<shm::RemoteSegment>(*group_.region_of(0), offer.place, os::Access::read_write);
  }
  if (bytes > segment->capacity()) throw Error(ErrorKind::corrupt, "a result has not the room that it needs");
  // Stamps may run over, as those of an offer do.
  const std::uint64_t stamp =
      (offer.first_stamp - 1 + static_cast<std::uint64_t>(group_.rank())) % ((1U << 30) - 1) + 1;
  auto lease = std::make_shared<shm::Lease>(
      segment, shm::LeaseId{static_cast<std::uint32_t>(group_.rank()), static_cast<std::uint32_t>(stamp)});
  return {segment->mapping().data(), std::move(lease)};
}

InputPlace SharedInputs::place_of(Bytes in) {
  const auto found = detail::ArenaCore::find(in.data(), in.size());
  if (!found) return {};
  return {found->arena->segment().place(), found->offset};
}

const std::byte* SharedInputs::map(std::size_t rank, const InputPlace& place, std::uint64_t bytes) {
  std::unique_ptr<shm::RemoteSegment>& segment = mapped_[{rank, place.arena}];
  if (!segment) {
    std::erase_if(mapped_, [](const auto& each) {
      return each.second != nullptr && each.second->header().retired.load(std::memory_order_acquire) != 0;
    });
    segment = std::make_unique<shm::RemoteSegment>(*group_.region_of(static_cast<int>(rank)), place.arena);
  }
  if (place.offset > segment->capacity() || bytes > segment->capacity() - place.offset)
    throw Error(ErrorKind::corrupt, "another rank names a place outside its arena");
  return segment->data() + place.offset;
}

}  // namespace muster::collectives
