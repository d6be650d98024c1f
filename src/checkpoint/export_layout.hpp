// SPDX-License-Identifier: Apache-2.0
#pragma once
// What rank 0 works out before the first byte moves: the merged tensors in the order of the output, the batches they
// travel in, and which tensors of each rank belong to each batch.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "muster/config.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/merge_layout.hpp"

namespace muster {

/// For each batch the rank's tensors that travel in it, by their place in its own file's list.
using Schedule = std::vector<std::vector<std::uint32_t>>;

inline constexpr std::uint64_t max_schedule_bytes = std::uint64_t{1} << 30;
std::vector<std::byte> encode_schedule(const Schedule& schedule);
/// Throws Error(corrupt) where it names a tensor at or past `tensors`.
Schedule decode_schedule(std::span<const std::byte> bytes, std::size_t tensors);

/// What one rank's shard has, as it travels to rank 0.
struct ShardListing {
  std::vector<NamedSpec> tensors;
  PaddedSizes padded;
};
Config shard_listing(const SafetensorsFile& shard, const PaddedSizes& padded);
/// Throws Error(corrupt) where it is no listing.
ShardListing parse_shard_listing(int rank, const Config& listing);

class ExportLayout {
 public:
  /// Throws as merge_layout, and Error(rank_mismatch) where the ranks remember different paddings.
  ExportLayout(const MergePlan& plan, std::vector<ShardListing> ranks, std::uint64_t batch_bytes);

  /// In the order of the output: by name, numbers by their value.
  [[nodiscard]] const std::vector<MergedTensor>& merged() const noexcept { return merged_; }
  /// [begin, end) of merged() for each batch.
  [[nodiscard]] const std::vector<std::pair<std::size_t, std::size_t>>& batches() const noexcept { return batches_; }
  [[nodiscard]] Schedule schedule(int rank) const;
  /// The ranks whose tensors merged()[index] needs, in ascending order.
  [[nodiscard]] std::span<const int> contributors(std::size_t index) const noexcept { return contributors_[index]; }
  /// What such a rank's tensor looks like.
  [[nodiscard]] const TensorSpec& source(std::size_t index, int rank) const noexcept;
  [[nodiscard]] std::uint64_t tensors_in() const noexcept;
  [[nodiscard]] std::size_t ranks() const noexcept { return ranks_.size(); }

 private:
  void make_batches(std::uint64_t batch_bytes);

  std::vector<std::vector<NamedSpec>> ranks_;
  std::vector<MergedTensor> merged_;
  std::vector<std::vector<int>> contributors_;
  std::vector<std::vector<std::uint32_t>> places_;  // [rank][index of merged_]
  std::vector<std::pair<std::size_t, std::size_t>> batches_;
};

}  // namespace muster
