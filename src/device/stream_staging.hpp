// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the parts of a stream (gather_each) come from devices to the host: straight into the slots that the first rank
// looks at where it shares memory with the sender, else through page-locked memory of one part, which is used again.

#include <cstdint>

#include "muster/sync_group.hpp"

namespace muster::cuda {

/// Gives back what streams of this group keep for it, where nothing uses it; returns the bytes. `group`: the one that
/// parts go by.
std::uint64_t trim_stream_staging(SyncGroup& group) noexcept;

}  // namespace muster::cuda
