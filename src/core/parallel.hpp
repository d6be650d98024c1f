// SPDX-License-Identifier: Apache-2.0
#pragma once
// Independent pieces of work over a few threads.

#include <cstddef>
#include <functional>

namespace muster {

/// Calls work(index, worker) for each index below `count`, each once, in about ascending order, on up to `workers`
/// threads (the caller's is one of them). The first exception is thrown again when all have stopped; what was not begun
/// then stays undone.
void parallel_for(std::size_t count, std::size_t workers, const std::function<void(std::size_t, std::size_t)>& work);

/// Threads worth having for copying and writing on this machine, shared by `processes` of them.
std::size_t copy_workers(int processes = 1) noexcept;

}  // namespace muster
