// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/tensor_target.hpp"

namespace muster::statefile {

void TensorTarget::add_to_checksum(std::uint64_t offset, std::span<const std::byte> bytes, std::uint64_t total) {
  const std::lock_guard lock(mutex_);
  if (offset != summed_ || bytes.empty()) return;
  if (offset == 0 && bytes.size() == total) {
    whole_ = tensor_checksum(bytes);
  } else {
    if (sum_ == nullptr) sum_ = std::make_unique<TensorChecksum>();
    sum_->add(bytes);
  }
  summed_ += bytes.size();
}

void TensorTarget::set_checksum(std::uint64_t checksum, std::uint64_t total) {
  const std::lock_guard lock(mutex_);
  whole_ = checksum;
  summed_ = total;
}

std::uint64_t TensorTarget::checksum() const {
  if (whole_) return *whole_;
  return sum_ == nullptr ? tensor_checksum({}) : sum_->value();
}

}  // namespace muster::statefile
