// SPDX-License-Identifier: Apache-2.0
#pragma once
// Carries out what assembly_plan.hpp planned: every process its own steps, in one order.
//
//  1. Every process makes its windows and hands them to all others that share memory with it.
//  2. It goes through its steps. direct: from its tensors to the file. window: it puts its part into the writer's
//     window, or sends it there (window_mail.hpp). hash: it hashes a tensor, which is compared at the end.
//  3. Where the window is its own, a second thread waits until all parts are there, reduces what is to be reduced,
//     writes, and frees the window.
//  4. A process that has done all that it writes of a file syncs and closes it, and says so (the stage): in shared
//     memory, or by a message before it begins with the file after the next one.
//  5. The first process finishes files in their order, as all have done with them: header, fsync, the file's name.
// A failure anywhere poisons the group of the assembly, so that every wait of every process ends at once.
//
// Nobody waits in a circle: take the earliest item that is not written. Whoever has not put its part there is in an
// earlier step, or waits for the window to be free, which an earlier item has; the writer's thread waits for nothing
// else. A writer takes in what other hosts send in its own steps, and hands the item to its thread after that.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "muster/sync_group.hpp"
#include "src/checkpoint/assembly_plan.hpp"
#include "src/checkpoint/journal.hpp"
#include "src/checkpoint/tensor_source.hpp"

namespace muster {

/// Where a file of the plan is while it grows, and what messages call it.
struct FileTarget {
  std::string name;
  std::string place;
};
/// Makes a file of the plan in `directory`, at its full size and under a name that no reader takes for it.
FileTarget grow_file(const std::string& directory, const FilePlan& file);
/// All but the header is on the disk: the header, last because until then the file begins with zeros, which no reader
/// takes for one; then the name.
void finish_file(const FilePlan& file, const FileTarget& target);

/// What a process found a tensor's bytes to be.
struct TensorHash {
  std::uint32_t set = 0;
  std::uint32_t tensor = 0;  ///< in the process's list
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

/// Called on any thread when this process has done with a file, before the others hear of it.
using WrittenCallback = std::function<void(std::uint32_t file, const std::vector<WrittenPart>& parts)>;

struct AssemblySettings {
  std::uint64_t window_bytes = 0;
  std::uint32_t depth = 2;
  WrittenCallback on_written = {};  ///< with it, what is written is hashed
};

/// Called by the first process, in the order of the files, when all of a file but its header is on the disk.
using FinishFile = std::function<void(std::uint32_t file)>;

/// Collective over `group`, which is poisoned by whoever fails: make one for it. `source` has this process's tensors.
/// `finish` and `progress` count on rank 0. Returns the hashes of this process's tensors that are to be compared.
/// Throws the first failure of any rank.
std::vector<TensorHash> assemble(SyncGroup& group, const ProcessWork& work, const TensorSource& source,
                                 std::span<const FileTarget> files, const AssemblySettings& settings,
                                 const FinishFile& finish, const std::function<void(std::uint64_t bytes)>& progress);

}  // namespace muster
