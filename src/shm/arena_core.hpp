// SPDX-License-Identifier: Apache-2.0
#pragma once
// ArenaCore: the memory behind SharedArena, its allocator, and the leases on it.

#include <boost/interprocess/indexes/iset_index.hpp>
#include <boost/interprocess/managed_external_buffer.hpp>
#include <boost/interprocess/mem_algo/rbtree_best_fit.hpp>
#include <boost/interprocess/sync/mutex_family.hpp>
#include <memory>
#include <optional>
#include <vector>

#include "muster/tensor.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/group/group.hpp"
#include "src/shm/segment.hpp"

namespace muster::detail {

class ArenaCore : public std::enable_shared_from_this<ArenaCore> {
 public:
  static std::shared_ptr<ArenaCore> create(std::uint64_t capacity);
  ~ArenaCore();
  ArenaCore& operator=(ArenaCore&&) = delete;

  Tensor allocate(DType dtype, Shape shape);
  [[nodiscard]] std::uint64_t capacity() const noexcept { return capacity_; }
  std::uint64_t available();
  std::uint64_t waiting_for_leases();
  [[nodiscard]] shm::OwnedSegment& segment() noexcept { return segment_; }

  /// Returns a lease on the whole arena. It lasts until the holder clears the lease word or dies. Throws
  /// Error(out_of_space) if too many leases are active.
  shm::LeaseId lend(std::shared_ptr<const group::PeerLiveness> holder);

  /// The arena of this process that contains all of [data, data + bytes), and the offset of `data` in it.
  struct ArenaRange {
    std::shared_ptr<ArenaCore> arena;
    std::uint64_t offset = 0;
  };
  static std::optional<ArenaRange> find(const std::byte* data, std::uint64_t bytes);

 private:
  // Only the owner allocates, under its own mutex: the shared memory contains no lock.
  using Buffer = boost::interprocess::basic_managed_external_buffer<
      char, boost::interprocess::rbtree_best_fit<boost::interprocess::null_mutex_family>,
      boost::interprocess::iset_index>;
  struct Freed {
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    std::vector<shm::LeaseId> leases;
  };

  explicit ArenaCore(std::uint64_t capacity);
  void release(std::byte* data, std::uint64_t bytes) noexcept;
  void reclaim() noexcept;

  std::uint64_t capacity_;
  shm::OwnedSegment segment_;
  Buffer buffer_;
  ForkMutex mutex_;
  std::vector<Freed> freed_;
};

}  // namespace muster::detail
