// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ranks forked from this process, and memory that they share with it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "bench/harness/meeting.hpp"

namespace bench {

/// Anonymous memory, zeros at first; `shared` (a memfd) with the children that are forked later. Unmapped at the end.
class Mapping {
 public:
  enum class Kind { ordinary, shared };

  Mapping(std::size_t bytes, Kind kind);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }

  /// Of shared memory: takes the pages of this part, by writing into it and then touching it. Written memory lies in
  /// larger pieces than memory that several processes fault in page by page, and copies into it are up to a tenth
  /// faster: a floor on the latter would not be one.
  void prefault(std::size_t offset, std::size_t length) const;

 private:
  std::span<std::byte> bytes_;
  int descriptor_ = -1;
};

/// Forks `size` ranks that each run `body`, and waits for them. When one fails, the rest are killed. Returns whether
/// all went well; what went wrong is on standard error.
bool run_ranks(int size, const std::function<void(Meeting&)>& body);

/// Bytes that this machine can still give out, as the kernel estimates them.
std::uint64_t available_memory();

}  // namespace bench
