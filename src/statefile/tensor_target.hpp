// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a writer knows of one tensor whose bytes are coming in: how many are there, and the checksum of those that came
// in their order. The others are read back in the end.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "src/core/checksum.hpp"

namespace muster::statefile {

class TensorTarget {
 public:
  /// Bytes that are in the file now. Any thread.
  void count(std::uint64_t bytes) noexcept { written_.fetch_add(bytes, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t written() const noexcept { return written_.load(std::memory_order_relaxed); }

  /// Takes them in if they are the next ones of `total`. Any thread.
  void add_to_checksum(std::uint64_t offset, std::span<const std::byte> bytes, std::uint64_t total);
  /// The checksum of all bytes, known from elsewhere.
  void set_checksum(std::uint64_t checksum, std::uint64_t total);
  /// How many bytes, from the first on, the checksum has.
  [[nodiscard]] std::uint64_t summed() const noexcept { return summed_; }
  /// Of the summed() bytes.
  [[nodiscard]] std::uint64_t checksum() const;

  /// Of a compressed tensor: the beginning of a chunk whose rest has not come yet. Used under mutex().
  struct Pending {
    std::uint64_t chunk = 0;
    std::vector<std::byte> bytes = {};
  };
  [[nodiscard]] std::mutex& mutex() noexcept { return mutex_; }
  [[nodiscard]] std::optional<Pending>& pending() noexcept { return pending_; }

 private:
  std::atomic<std::uint64_t> written_{0};
  std::mutex mutex_;
  std::uint64_t summed_ = 0;
  std::optional<std::uint64_t> whole_;   // the checksum of all bytes where they came at once
  std::unique_ptr<TensorChecksum> sum_;  // else
  std::optional<Pending> pending_;
};

}  // namespace muster::statefile
