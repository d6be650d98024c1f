// SPDX-License-Identifier: Apache-2.0
#pragma once
// Names to places in a list. One allocation for all, because listing ten thousand tensors shall take no time.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "muster/state_file.hpp"

namespace muster::statefile {

class NameIndex {
 public:
  NameIndex() = default;
  /// Takes in the names of all `tensors`, up to the first that was there before: its place comes back.
  std::optional<std::size_t> build(const std::vector<StateTensor>& tensors);
  /// `tensors`: the list that was built from.
  [[nodiscard]] std::optional<std::size_t> find(const std::vector<StateTensor>& tensors,
                                                std::string_view name) const noexcept;

 private:
  std::vector<std::uint32_t> slots_;  // place + 1; a power of two of them, at most half in use
};

}  // namespace muster::statefile
