// SPDX-License-Identifier: Apache-2.0
#pragma once
// Collectives of a ProcessGroup for tensors on devices, by NCCL: what each call asks of it, and the memory that results
// and rearranged tensors take. What calls have in common is in nccl_calls.hpp.

#include <span>

#include "src/collectives/backend.hpp"
#include "src/device/nccl_calls.hpp"

namespace muster::cuda {

using collectives::Bytes;
using collectives::Card;
using collectives::Opened;
using collectives::Room;

/// Throws Error(unsupported) if NCCL has no such reduction.
NcclReduction nccl_reduction(merge::Combine combine, DType dtype);

class NcclBackend final : public collectives::DeviceBackend {
 public:
  NcclBackend(sync::Group& group, collectives::Backend& round) : group_(group), calls_(group, round) {}

  [[nodiscard]] std::string_view name() const noexcept override { return "NCCL"; }
  collectives::Place begin(std::span<const Device> devices) override { return calls_.begin(devices); }
  [[nodiscard]] Bytes bytes_of(const TensorView& tensor) const override;
  void check_reducible(merge::Combine combine, DType dtype) const override { (void)nccl_reduction(combine, dtype); }
  void check_can_allocate() const override;
  [[nodiscard]] Tensor allocate(DType dtype, Shape shape) override;
  [[nodiscard]] Tensor cut(const TensorView& tensor, std::size_t dim, std::span<const std::int64_t> extents) override;
  [[nodiscard]] Tensor join(const Tensor& parts, std::span<const std::uint64_t> sizes, std::uint64_t rows) override;
  void wait(const WaitOptions& options) override { calls_.wait(options); }
  void abort() noexcept override { calls_.abort(); }

  void all_reduce(const Card& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in, Room out,
                  const WaitOptions& options) override;
  void reduce_scatter(const Card& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                      std::span<const std::uint64_t> bounds, Room out, const WaitOptions& options) override;
  void all_gather(const Card& card, const Opened& opened, Bytes in, std::span<const Room> outs,
                  const WaitOptions& options) override;
  void all_to_all(const Card& card, const Opened& opened, std::span<const Bytes> ins, std::span<const Room> outs,
                  const WaitOptions& options) override;

  /// For calls that Backend has not.
  [[nodiscard]] NcclCalls& calls() noexcept { return calls_; }

 private:
  [[nodiscard]] std::size_t self() const noexcept { return static_cast<std::size_t>(group_.rank()); }

  sync::Group& group_;
  NcclCalls calls_;
};

}  // namespace muster::cuda
