// SPDX-License-Identifier: Apache-2.0
#pragma once
// How files are put together from tensors that several processes have: who copies what where, and who writes it.
//
// A file is cut into items, contiguous runs of its bytes. An item whose bytes come from its writer alone is direct: it
// goes from where it lies to the file. All others go through a window, a piece of the writer's shared memory in which
// every process puts its part, all in parallel; if tensors are reduced (max, sum), each puts a whole contribution
// beside it, and the writer reduces. All processes go through the items in one order, the files', which is why nobody
// waits for something that waits for him.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "muster/export.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/checkpoint/output_directory.hpp"
#include "src/checkpoint/tensor_source.hpp"
#include "src/checkpoint/viewed_tensors.hpp"
#include "src/merge/layout.hpp"
#include "src/sync/group.hpp"

namespace muster {

struct OutputFile {
  std::string name;
  std::map<std::string, std::string> metadata;
  std::vector<MergedTensor> tensors;
};

struct ReduceStep {
  merge::Combine combine = merge::Combine::max;
  DType dtype = DType::u8;
  std::uint64_t to = 0;
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> from;  ///< where in the window the contributions are
};

enum class StepKind : std::uint8_t { direct, window, hash };

/// What one process does for one item.
struct Step {
  StepKind kind = StepKind::direct;
  std::uint8_t has_gaps = 0;  ///< bytes that nobody copies are zero
  std::uint32_t file = 0;     ///< hash: the number of the set
  std::uint64_t offset = 0;   ///< of the item in the file
  std::uint64_t bytes = 0;    ///< of the item
  std::uint32_t writer = 0;   ///< a process
  std::uint32_t turn = 0;     ///< of the writer's windows, counted from 0
  std::uint32_t contributors = 0;
  /// From this process's tensors (`source`: the place in its list) to the item's window. hash: one, of `bytes` from
  /// `from` on (0: all of the tensor).
  std::vector<merge::Rectangle> copies;
  std::vector<std::uint32_t> senders;  ///< the writer's: contributors on other hosts (WindowMail)
  std::vector<ReduceStep> reductions;  ///< the writer's
};

/// Where a file of the plan is while it grows, and what messages call it.
struct FileTarget {
  std::string name;
  std::string place;
};

/// What one process does in all.
struct ProcessWork {
  std::vector<Step> steps;
  std::uint32_t turns = 0;    ///< of its own windows
  std::uint64_t written = 0;  ///< bytes it writes
  std::uint64_t window_bytes = 0;
  std::uint32_t depth = 0;          ///< windows of each writer
  std::string directory;            ///< of the files, which whoever makes them adds here
  std::vector<FileTarget> targets;  ///< one a file of the plan; likewise
  /// What this process's list of tensors is made of; empty: they are those of its shards. Likewise.
  std::vector<ViewedTensor> views;
};

struct FilePlan {
  std::string name;
  std::string header;
  std::uint64_t bytes = 0;  ///< header included
  std::map<std::string, std::string> metadata;
  std::vector<TensorEntry> tensors;  ///< with offsets
};

struct AssemblyPlan {
  std::vector<FilePlan> files;
  std::vector<ProcessWork> processes;
  std::uint64_t bytes = 0;  ///< of all tensors
};

struct AssemblyShape {
  int processes = 1;
  Writers writers = Writers::owners;
  std::uint64_t window_bytes = 8 << 20;
  std::uint32_t depth = 2;    ///< windows of each writer
  bool all_have_all = false;  ///< every process has all tensors, whatever their ranks: each item is one process's
  /// The host of each process; empty: one of all. Processes of one host share memory.
  std::vector<int> hosts = {};
  /// All of a file is written on one host: clients of a network file system that write to one file at a time may undo
  /// each other's bytes, where these share a page.
  bool one_host_a_file = false;

  [[nodiscard]] int host_of(int process) const { return hosts.empty() ? 0 : hosts[static_cast<std::size_t>(process)]; }
};

/// Headers, places and lengths alone.
std::vector<FilePlan> plan_files(std::span<const OutputFile> files);

/// `equal`: sets of sources that must be bit for bit equal. `there`: names of files that are there already.
AssemblyPlan plan_assembly(std::span<const OutputFile> files, std::span<const std::vector<SourceRef>> equal,
                           std::span<const RankSources> ranks, const AssemblyShape& shape,
                           const std::set<std::string>& there = {});

std::vector<std::byte> encode_work(const ProcessWork& work);
/// Throws Error(corrupt).
ProcessWork decode_work(std::span<const std::byte> bytes);

// How it is carried out: every process its own steps, in one order.
//
//  1. Every process makes its windows and tells all others where they are.
//  2. It goes through its steps. direct: from its tensors to the file. window: it puts its part into the writer's
//     window, or sends it there (WindowMail). hash: it hashes a tensor, which is compared at the end.
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

/// Called by the first process, in the order of the files, when all of a file but its header is on the disk.
using FinishFile = std::function<void(std::uint32_t file)>;

/// Collective over `group`, which is poisoned by whoever fails: make one for it. `source` has this process's tensors.
/// With `on_written`, what is written is hashed. `finish` and `progress` count on rank 0. Returns the hashes of this
/// process's tensors that are to be compared. Throws the first failure of any rank.
std::vector<TensorHash> assemble(SyncGroup& group, const ProcessWork& work, const TensorSource& source,
                                 const WrittenCallback& on_written, const FinishFile& finish,
                                 const std::function<void(std::uint64_t bytes)>& progress);

// Parts of windows from processes that share no memory with the writer: as messages of the group, whatever it is.
//
//  1. The writer comes to an item, has a free window for it, and sends a word to every such contributor.
//  2. A contributor comes to the item, waits for that word, and sends its rows, packed, in messages of bounded size;
//     each says where its rows go, and the last one that it is the last.
//  3. The writer puts them into the window.
//  4. A process that does not share memory with process 0 tells it, at points of the order that both know, how many
//     files it has done with (the stage), and how much it has written.
//
// All processes go through items in one order, so that messages between two of them come in the order in which they are
// expected, and nobody waits in a circle: take the earliest item that is not through. Its writer waits for contributors
// that are on their way to it or there, and they for their writer; neither waits for anything later.
//
// The word of step 1 is the credit: nobody sends what the writer has no window for, so that a slow disk holds up
// senders, and fills no memory.

/// One process's. Used by the thread that uses the group.
class WindowMail {
 public:
  /// At most so much of a window is in a message.
  static constexpr std::uint64_t piece_bytes(std::uint64_t window_bytes) noexcept {
    return std::min<std::uint64_t>(window_bytes / 4, 1 << 20);
  }

  WindowMail(SyncGroup& group, const TensorSource& source, std::uint64_t window_bytes);

  /// Step 2. Throws as SyncGroup::send and read_rows.
  void contribute(const Step& step);
  /// Steps 1 and 3. Throws as SyncGroup::receive, and Error(corrupt) on rows that lie outside the window.
  void collect(const Step& step, std::span<std::byte> window);

  /// Step 4.
  struct Stage {
    std::uint32_t files = 0;
    std::uint64_t bytes = 0;
  };
  void tell_stage(const Stage& stage);
  Stage hear_stage(int from);

 private:
  void pack(const merge::Rectangle& copy, std::uint32_t turn, int writer);
  void send_piece(std::uint32_t turn, int writer, bool is_last);
  [[nodiscard]] bool take_piece(int from, std::uint32_t turn, std::span<std::byte> window);

  sync::Group& group_;
  const TensorSource& source_;
  std::uint64_t piece_bytes_;
  std::vector<std::byte> piece_;  // the message that is being packed
};

}  // namespace muster
