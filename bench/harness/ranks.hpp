// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ranks forked from this process, and memory that they share with it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "bench/harness/meeting.hpp"

namespace bench {

/// Anonymous memory, zeros at first; `shared` with the children that are forked later. Unmapped at the end.
class Mapping {
 public:
  enum class Kind { ordinary, shared };

  Mapping(std::size_t bytes, Kind kind);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

/// Forks `size` ranks that each run `body`, and waits for them. When one fails, the rest are killed. Returns whether
/// all went well; what went wrong is on standard error.
bool run_ranks(int size, const std::function<void(Meeting&)>& body);

/// Bytes that this machine can still give out, as the kernel estimates them.
std::uint64_t available_memory();

}  // namespace bench
