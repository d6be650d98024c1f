// SPDX-License-Identifier: Apache-2.0
#pragma once
// The floor: what moving the bytes costs where nothing else is done. All senders copy in parallel into shared memory;
// the first rank's own bytes stay where they are. Two floors: into memory that is mapped and touched (every exchange
// but the first), and into fresh memory (the first).

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "bench/harness/measure.hpp"
#include "bench/harness/meeting.hpp"

namespace bench {

/// Shared memory that floor_contenders() needs: a slot for each sender.
std::size_t floor_memory(int ranks, std::size_t bytes);

/// How a sender takes the pages of its part of the floor's memory: Mapping::prefault, or memset where all there is is a
/// mapping.
using Prefault = std::function<void(std::size_t offset, std::size_t length)>;

/// memcpy and non-temporal stores into `area`, which all ranks share and which has floor_memory() bytes. Prefaults it
/// on this rank. Collective. The memory outlives the contenders.
std::vector<Contender> floor_contenders(Meeting& meeting, std::span<std::byte> source, std::span<std::byte> area,
                                        const Prefault& prefault);

/// Parallel pwrite, and parallel mapped copies, each into a fresh memfd. The first rank maps it when it reads.
std::vector<Contender> fresh_floor_contenders(Meeting& meeting, std::span<std::byte> source);

}  // namespace bench
