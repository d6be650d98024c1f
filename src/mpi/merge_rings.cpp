// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/merge_rings.hpp"

#include <utility>

namespace muster::mpi {

MergeRing& MergeRings::give(int sender, std::uint64_t known, std::uint64_t window_bytes) {
  MergeRing& ring = own_[sender];
  if (ring.windows && ring.place == known && ring.windows->window_bytes() >= window_bytes) return ring;
  ring = {};
  ring.windows = std::make_shared<shm::WindowRing>(depth, window_bytes, 1);
  ring.place = ring.windows->place();
  return ring;
}

namespace {

std::uint64_t bytes_of_ring(const MergeRing& ring) noexcept {
  return ring.windows ? MergeRings::depth * ring.windows->window_bytes() : 0;
}

}  // namespace

std::uint64_t MergeRings::bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const auto& [sender, ring] : own_) sum += bytes_of_ring(ring);
  return sum;
}

std::uint64_t MergeRings::bytes_of(std::span<const int> senders) const noexcept {
  std::uint64_t sum = 0;
  for (const int sender : senders)
    if (const auto known = own_.find(sender); known != own_.end()) sum += bytes_of_ring(known->second);
  return sum;
}

std::uint64_t MergeRings::trim() noexcept {
  const std::uint64_t gone = bytes();
  own_.clear();
  theirs_.clear();
  return gone;
}

std::shared_ptr<MergeRings> merge_rings_of(SyncGroup& group) {
  static const char key = 0;
  return std::static_pointer_cast<MergeRings>(group.extension(&key, [] { return std::make_shared<MergeRings>(); }));
}

}  // namespace muster::mpi
