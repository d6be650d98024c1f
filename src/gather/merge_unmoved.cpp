// SPDX-License-Identifier: Apache-2.0
// Merges in which no element moves: of one rank, First, and Same, whose ranks only compare hashes (in round 1).

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "src/core/element_range.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/route.hpp"
#include "src/merge/layout.hpp"

namespace muster::gather {
namespace {

constexpr std::uint64_t merged_at_once = 4 << 20;  // between two signs of progress
constexpr std::uint64_t staged_at_once = 1 << 20;  // strided elements at a time

XXH128_hash_t hash_of(const TensorView& tensor, SyncGroup& group) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  if (tensor.is_contiguous()) {
    for (auto left = tensor.bytes(); !left.empty();) {
      const auto piece = left.first(std::min<std::uint64_t>(left.size(), merged_at_once));
      XXH3_128bits_update(&state, piece.data(), piece.size());
      left = left.subspan(piece.size());
      group.progress();
    }
  } else {
    const std::size_t item = itemsize(tensor.dtype());
    const auto at_once = static_cast<std::int64_t>(staged_at_once / item);
    std::vector<std::byte> staging(std::min<std::uint64_t>(tensor.nbytes(), staged_at_once));
    for (std::int64_t done = 0; done < tensor.elements(); done += at_once) {
      const std::int64_t end = std::min(done + at_once, tensor.elements());
      core::copy_elements(tensor, done, end, staging.data());
      XXH3_128bits_update(&state, staging.data(), static_cast<std::size_t>(end - done) * item);
      group.progress();
    }
  }
  return XXH3_128bits_digest(&state);
}

/// The same elements under the shape that the merge gives them.
TensorView reshaped(const TensorView& tensor, const Merge& merge) {
  if (!std::holds_alternative<merge::Stack>(merge)) return tensor;
  Shape shape = tensor.shape();
  shape.insert(shape.begin(), 1);
  Strides strides = tensor.strides();
  if (!strides.empty()) strides.insert(strides.begin(), 0);
  return {tensor.dtype(), std::move(shape), tensor.data(), std::move(strides), tensor.device()};
}

class UnmovedMerge final : public Transfer {
 public:
  explicit UnmovedMerge(const Call& call) : call_(call) {}

  void offer(Record& record) override {
    const TensorView& own = call_.value->as_tensor().view();
    record.merge = merge_number(*call_.merge);
    record.payload_bytes = own.nbytes();
    record.facts[fact_extent] =
        static_cast<std::uint64_t>(merge_extent(*call_.merge, TensorSpec{own.dtype(), own.shape()}));
    if (call_.list.size() > 1 && std::holds_alternative<merge::Same>(*call_.merge)) {
      const XXH128_hash_t hash = hash_of(own, *call_.group);
      record.facts[fact_hash_low] = hash.low64;
      record.facts[fact_hash_high] = hash.high64;
    }
    if (!call_.is_first()) return;
    // Made before the others rely on this rank: nothing can fail later.
    const TensorView target = reshaped(own, *call_.merge);
    result_ = call_.options->own == Own::copy ? Tensor::copy_of(target) : Tensor::borrow(target);
  }
  void move(std::span<const Record>, ExchangeReport&) override {}
  std::vector<std::optional<Config>> deliver() override {
    std::vector<std::optional<Config>> entries(1);
    entries.front() = Config(std::move(result_));
    return entries;
  }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return 0; }

 private:
  const Call& call_;
  Tensor result_;
};

}  // namespace

std::unique_ptr<Transfer> make_unmoved_merge(const Call& call) {
  return std::make_unique<UnmovedMerge>(call);
}

}  // namespace muster::gather
