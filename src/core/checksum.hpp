// SPDX-License-Identifier: Apache-2.0
#pragma once
// The checksum of a tensor: XXH3-64 with seed 0 of its elements as they are in memory, in whatever file they are. It
// finds accidents, not attackers.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace muster {

/// The checksum of a tensor whose bytes come in pieces, in their order. Not thread-safe.
class TensorChecksum {
 public:
  TensorChecksum();
  TensorChecksum(TensorChecksum&&) noexcept;
  TensorChecksum& operator=(TensorChecksum&&) noexcept;
  ~TensorChecksum();
  void add(std::span<const std::byte> bytes);
  /// Of all that was added so far.
  [[nodiscard]] std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Of a whole tensor.
std::uint64_t tensor_checksum(std::span<const std::byte> bytes);

/// Of a mapped tensor of any size: read once in pieces, whose pages are given back. `done` is told of the bytes of each
/// piece. Throws Error(io) if the file has become shorter or its disk fails; `path` is for that message.
std::uint64_t mapped_checksum(std::span<const std::byte> bytes, const std::string& path,
                              const std::function<void(std::uint64_t)>& done = {});

/// 16 digits.
std::string checksum_text(std::uint64_t checksum);

}  // namespace muster
