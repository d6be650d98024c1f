// SPDX-License-Identifier: Apache-2.0
#pragma once
// The checksum of a tensor: XXH3-64 with seed 0 over its elements as they are in memory, independent of the file
// format. It detects accidental changes, not attacks.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace muster {

/// Computes the checksum of a tensor whose bytes are added in pieces, in order. Not thread-safe.
class TensorChecksum {
 public:
  TensorChecksum();
  TensorChecksum(TensorChecksum&&) noexcept;
  TensorChecksum& operator=(TensorChecksum&&) noexcept;
  ~TensorChecksum();
  void add(std::span<const std::byte> bytes);
  /// Returns the checksum of all bytes that were added so far.
  [[nodiscard]] std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns the checksum of a whole tensor.
std::uint64_t tensor_checksum(std::span<const std::byte> bytes);

/// Returns the checksum of a mapped tensor of any size. It reads the tensor once in pieces, and drops the pages of each
/// piece. Calls `done` with the size of each piece. Throws Error(io) with `path` in its message if the file has become
/// shorter or its disk fails.
std::uint64_t mapped_checksum(std::span<const std::byte> bytes, const std::string& path,
                              const std::function<void(std::uint64_t)>& done = {});

/// Returns 16 hexadecimal digits.
std::string checksum_text(std::uint64_t checksum);

}  // namespace muster
