// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a small file gets its name: whole, or not at all.
//
//  1. Created under a growing name in the same directory (names.hpp), written, fsynced if asked for, closed; what
//     close() reports counts.
//  2. Renamed. Where the answer was lost on the way, a repeated request finds no file to rename (ENOENT): then the name
//     is looked at, and where it is our file the rename has happened.
//  3. If asked for, the directory is fsynced: from then on a power cut takes neither the bytes nor the name.
//  4. What fails before 3 leaves nothing.

#include <cstddef>
#include <span>
#include <string>

#include "src/os/small_file.hpp"

namespace muster::workspace {

/// Throws Error(no_space | io | not_found).
void publish(const std::string& directory, const std::string& name, std::span<const std::byte> bytes,
             os::Durability durability = os::Durability::unsynced);

/// Likewise, but never in place of a file that is there: false then. Exactly one of several that try at the same time
/// gets true.
bool publish_first(const std::string& directory, const std::string& name, std::span<const std::byte> bytes,
                   os::Durability durability = os::Durability::unsynced);

}  // namespace muster::workspace
