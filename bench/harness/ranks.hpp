// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ranks that are forked from this process, and memory that they share with it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "bench/harness/meeting.hpp"

namespace bench {

/// Anonymous memory that initially contains zeros. `shared` memory (a memfd) is shared with children that are forked
/// later.
class Mapping {
 public:
  enum class Kind { ordinary, shared };

  Mapping(std::size_t bytes, Kind kind);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }

  /// For shared memory: allocates the pages of this part by a write to the file, then touches them. Memory that was
  /// allocated by a write consists of larger contiguous pieces than memory that several processes fault in page by
  /// page. Copies into it are up to a tenth faster, so a floor without this would be too slow.
  void prefault(std::size_t offset, std::size_t length) const;

 private:
  std::span<std::byte> bytes_;
  int descriptor_ = -1;
};

/// Forks `size` ranks that each run `body`, and waits for them. If one fails, the others are killed. Returns whether
/// all succeeded; errors are printed on standard error.
bool run_ranks(int size, const std::function<void(Meeting&)>& body);

/// Returns the available memory of this machine in bytes, as estimated by the kernel.
std::uint64_t available_memory();

}  // namespace bench
