// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checksums of a checkpoint's tensors, in a file beside them: so that what was exported can be told from what the disk
// or a copy made of it. They find accidents, not attackers.
//
// muster.checksums.json: {"muster_checksums": 1, "algorithm": "xxh3-64", "tensors": {NAME: "16 hexadecimal digits"}};
// a tensor's checksum is XXH3-64 with seed 0 of its bytes as they are in the file, so it does not change when tensors
// move to other files.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "muster/safetensors.hpp"

namespace muster {

inline constexpr std::string_view checksums_file_name = "muster.checksums.json";

/// By tensor name (core/checksum.hpp).
using Checksums = std::map<std::string, std::uint64_t, std::less<>>;

/// Of one tensor, read in pieces; `done` is told of the bytes of each. Throws as SafetensorsFile::read, and what `done`
/// throws.
std::uint64_t checksum_of(const SafetensorsFile& file, std::size_t index,
                          const std::function<void(std::uint64_t)>& done);

/// The file's text. Throws Error(argument) on a name that is not UTF-8.
std::string checksums_text(const Checksums& checksums);
/// Throws Error(corrupt) on what is no such text, Error(version | unsupported) on another version or algorithm.
Checksums parse_checksums(std::string_view text);

/// The file in `directory`; none where there is none. Throws Error(io), and as parse_checksums with the file's path.
std::optional<Checksums> read_checksums(const std::string& directory);
/// Appears whole, replacing an older one, and is durable. Throws Error(io | no_space | not_found).
void write_checksums(const std::string& directory, const Checksums& checksums);

}  // namespace muster
