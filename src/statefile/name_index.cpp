// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/name_index.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>
#include <span>

#include "src/os/process.hpp"

namespace muster::statefile {
namespace {

// A file made to have all names in one slot must not know which slot that is.
std::uint64_t seed() {
  static const std::uint64_t value = [] {
    std::uint64_t random = 0;
    os::random_bytes(std::as_writable_bytes(std::span(&random, 1)));
    return random;
  }();
  return value;
}

std::size_t hash(std::string_view name, std::uint64_t with) noexcept {
  return XXH3_64bits_withSeed(name.data(), name.size(), with);
}

}  // namespace

std::optional<std::size_t> NameIndex::build(const std::vector<StateTensor>& tensors) {
  slots_.assign(std::bit_ceil(2 * tensors.size() + 1), 0);
  const std::size_t mask = slots_.size() - 1;
  const std::uint64_t with = seed();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::size_t slot = hash(tensors[i].name, with) & mask;
    for (; slots_[slot] != 0; slot = (slot + 1) & mask)
      if (tensors[slots_[slot] - 1].name == tensors[i].name) return i;
    slots_[slot] = static_cast<std::uint32_t>(i + 1);
  }
  return std::nullopt;
}

std::optional<std::size_t> NameIndex::find(const std::vector<StateTensor>& tensors,
                                           std::string_view name) const noexcept {
  if (slots_.empty()) return std::nullopt;
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t slot = hash(name, seed()) & mask; slots_[slot] != 0; slot = (slot + 1) & mask)
    if (tensors[slots_[slot] - 1].name == name) return slots_[slot] - 1;
  return std::nullopt;
}

}  // namespace muster::statefile
