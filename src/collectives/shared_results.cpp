// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/shared_results.hpp"

#include "muster/error.hpp"
#include "src/shm/arena_core.hpp"

namespace muster::collectives {
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
