// SPDX-License-Identifier: Apache-2.0
#pragma once
// Elements with strides in a file, brought to places with strides in memory.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/formats/zip.hpp"

namespace muster::foreign {

struct StridedAxis {
  std::uint64_t count = 0;
  std::uint64_t from = 0;  ///< bytes from one to the next in the file
  std::uint64_t to = 0;    ///< and in memory
};

/// Reads stretches of the file in which enough is wanted, some MiB at most, and copies from them; long rows go straight
/// to their places. Throws as `read`.
void read_strided(const formats::ReadAt& read, std::uint64_t begin, std::vector<StridedAxis> axes, std::size_t item,
                  std::byte* target);

}  // namespace muster::foreign
