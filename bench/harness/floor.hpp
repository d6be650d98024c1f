// SPDX-License-Identifier: Apache-2.0
#pragma once
// The floor is the lower bound: the cost of moving the bytes without any other work. All senders copy in parallel into
// shared memory, and the root's own bytes are not copied. There are two floors: into memory that is mapped and touched
// (for every exchange except the first), and into new memory (for the first exchange).

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "bench/harness/measure.hpp"
#include "bench/harness/meeting.hpp"

namespace bench {

/// Returns the size of the shared memory that floor_contenders() needs: one slot per sender.
std::size_t floor_memory(int ranks, std::size_t bytes);

/// Allocates the pages of a sender's part of the floor's memory: Mapping::prefault, or memset if the memory is not a
/// Mapping.
using Prefault = std::function<void(std::size_t offset, std::size_t length)>;

/// Contenders that copy with memcpy and with non-temporal stores into `area`. All ranks share `area`, which has
/// floor_memory() bytes and must outlive the contenders. Prefaults it on this rank. Collective.
std::vector<Contender> floor_contenders(Meeting& meeting, std::span<std::byte> source, std::span<std::byte> area,
                                        const Prefault& prefault);

/// Contenders that write in parallel into new memfds: with pwrite, and by copies into a mapping. The root maps the
/// memory when it reads it.
std::vector<Contender> fresh_floor_contenders(Meeting& meeting, std::span<std::byte> source);

}  // namespace bench
