// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `muster convert` does: a file of tensors in another format.

#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>

#include "muster/progress.hpp"

namespace muster::inspect {

/// "zstd" or "zstd:3": the level, 1 where none is given; "none": none. Throws Error(argument).
std::optional<int> parse_compression(const std::string& text);

struct ConvertOptions {
  std::optional<int> zstd_level = {};  ///< of a state file
  bool force = false;                  ///< replace a file that is there
  ProgressCallback progress = {};
  std::stop_token stop = {};  ///< a request ends it: Error(cancelled), and nothing is left behind
};

struct ConvertReport {
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;         ///< of these
  std::uint64_t stored_bytes = 0;  ///< of the new file
  double seconds = 0;
};

/// `in`: a safetensors, state or any other HDF5 file, told by what is in it. `out`: by its name's end, ".safetensors",
/// or ".h5" or ".hdf5" of a state file. Tensors keep names, dtypes, shapes and bits; config and metadata by the rule of
/// shard_metadata.hpp; a state file made from a state file keeps whose it is. `out` appears whole or not at all; what a
/// killed conversion to it left on this host goes. Memory is some pieces of some MiB, a thread each. Local. Throws
/// Error(argument) where `out` is there and not forced, is `in`, or a name has no place in its format; as open_source,
/// SafetensorsWriter and StateFileWriter.
ConvertReport convert(const std::string& in, const std::string& out, const ConvertOptions& options = {});

}  // namespace muster::inspect
