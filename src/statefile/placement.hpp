// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a state file shall hold, checked, and where each uncompressed tensor will lie.

#include <cstdint>
#include <string>
#include <vector>

#include "muster/state_file.hpp"
#include "src/statefile/catalogue.hpp"

namespace muster::statefile {

struct Placement {
  Catalogue catalogue;         ///< checksums, and all of compressed tensors but their chunks' number, still missing
  std::uint64_t data_end = 0;  ///< compressed chunks, then everything else, come from here on
};

/// Throws Error(argument) on names, shapes and options that cannot be; `path` is for the message.
Placement place_tensors(std::vector<StateFileWriter::Entry> entries, const StateFileOptions& options,
                        const std::string& path);

}  // namespace muster::statefile
