// SPDX-License-Identifier: Apache-2.0
#pragma once
// Elements with strides in a file or a tensor, brought to places with strides in memory.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "src/formats/zip.hpp"

namespace muster {

struct StridedAxis {
  std::uint64_t count = 0;
  std::uint64_t from = 0;  ///< bytes from one to the next in the file
  std::uint64_t to = 0;    ///< and in memory
};

/// Whether all items from the byte `begin` on lie within `size` bytes.
bool is_within(std::uint64_t begin, std::span<const StridedAxis> axes, std::size_t item, std::uint64_t size) noexcept;

/// From memory.
void copy_strided(const std::byte* from, std::vector<StridedAxis> axes, std::size_t item, std::byte* to);

/// Reads stretches of the file in which what is wanted lies close together, 1 MiB at most, and copies from them; long
/// rows go straight to their places. Throws as `read`.
void read_strided(const formats::ReadAt& read, std::uint64_t begin, std::vector<StridedAxis> axes, std::size_t item,
                  std::byte* target);

}  // namespace muster
