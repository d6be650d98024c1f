// SPDX-License-Identifier: Apache-2.0
#pragma once
// Caches pieces of tensors of which several files get parts.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "src/base/fork_mutex.hpp"
#include "src/checkpoint/model/tensor_source.hpp"

namespace muster {

/// Reads whole pieces of 1 MiB, and caches the last ones. Shards have checksums of the same pieces, so each piece is
/// verified while it is read, and is not read again for that.
class RecentPieces : public TensorSource {
 public:
  /// Keeps `count` pieces, or more if threads use more at once.
  RecentPieces(std::shared_ptr<const TensorSource> source, std::size_t count)
      : source_(std::move(source)), count_(count) {}
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return source_->tensors(); }
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override { return source_->detail(tensor); }
  [[nodiscard]] const Omissions& omissions() const noexcept override { return source_->omissions(); }
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override;

 private:
  struct RecentPiece {
    std::size_t tensor = 0;
    std::uint64_t begin = 0;
    std::size_t users = 0;
    ForkMutex reading;
    bool is_read = false;
    std::vector<std::byte> bytes;
  };
  using Use = std::unique_ptr<RecentPiece, std::function<void(RecentPiece*)>>;
  /// Returns a piece. Its memory is not reused while a Use of it exists.
  [[nodiscard]] Use use(std::size_t tensor, std::uint64_t begin) const;

  std::shared_ptr<const TensorSource> source_;
  std::size_t count_;
  mutable ForkMutex mutex_;
  mutable std::vector<std::unique_ptr<RecentPiece>> pieces_;  // most recently used first
};

}  // namespace muster
