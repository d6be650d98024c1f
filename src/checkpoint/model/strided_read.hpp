// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies strided elements of a file or a tensor to strided positions in memory.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "src/formats/zip.hpp"

namespace muster {

struct StridedAxis {
  std::uint64_t count = 0;
  std::uint64_t from = 0;  ///< distance between neighbours in the file, in bytes
  std::uint64_t to = 0;    ///< distance between neighbours in memory, in bytes
};

/// Whether all items from the byte `begin` on lie within `size` bytes.
bool is_within(std::uint64_t begin, std::span<const StridedAxis> axes, std::size_t item, std::uint64_t size) noexcept;

/// Copies from memory.
void copy_strided(const std::byte* from, std::vector<StridedAxis> axes, std::size_t item, std::byte* to);

/// Reads ranges of the file in which the requested items are close together, 1 MiB at most, and copies from them; long
/// rows are read directly to their destination. Throws as `read`.
void read_strided(const formats::ReadAt& read, std::uint64_t begin, std::vector<StridedAxis> axes, std::size_t item,
                  std::byte* target);

}  // namespace muster
