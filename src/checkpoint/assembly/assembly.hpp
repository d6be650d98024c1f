// SPDX-License-Identifier: Apache-2.0
#pragma once
// Assembles files from tensors that several processes have: determines which process copies which bytes, and which one
// writes them.
//
// A file is cut into items, contiguous ranges of its bytes. An item whose bytes all come from its writer is direct: it
// is written from its place in memory or in the source. All other items use a window, a staging buffer in the writer's
// shared memory, into which all processes copy their parts in parallel. If tensors are reduced (max, sum), each process
// copies a whole contribution next to the item, and the writer reduces them. All processes handle the items in one
// order, that of the files, so that they cannot deadlock.

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
#include "src/checkpoint/model/output_directory.hpp"
#include "src/checkpoint/model/tensor_source.hpp"
#include "src/checkpoint/plan/viewed_tensors.hpp"
#include "src/group/group.hpp"
#include "src/merge/layout.hpp"

namespace muster {

struct OutputFile {
  std::string name;
  std::map<std::string, std::string> metadata;
  std::vector<MergedTensor> tensors;
  /// If not 0: the file has other tensors before this offset, and gets its header later (growing_files.hpp).
  std::uint64_t begin = 0;
  /// The process that writes all of the file; -1: several may write to it.
  int writer = -1;
};

struct ReduceStep {
  merge::Combine combine = merge::Combine::max;
  DType dtype = DType::u8;
  std::uint64_t to = 0;
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> from;  ///< offsets of the contributions in the window
};

enum class StepKind : std::uint8_t { direct, window, hash };

/// One process's work for one item.
struct Step {
  StepKind kind = StepKind::direct;
  std::uint8_t has_gaps = 0;  ///< bytes that no process copies are zero
  std::uint32_t file = 0;     ///< hash: the number of the set
  std::uint64_t offset = 0;   ///< of the item in the file
  std::uint64_t bytes = 0;    ///< of the item
  std::uint32_t writer = 0;   ///< the process that writes the item
  std::uint32_t turn = 0;     ///< index among the writer's windows, from 0 on
  std::uint32_t contributors = 0;
  /// Copies from this process's tensors (`source` is an index in its list) to the item's window. hash: a single one, of
  /// rows of `bytes` from `from` on (0: the whole tensor).
  std::vector<merge::Rectangle> copies;
  std::vector<std::uint32_t> senders;  ///< writer only: contributors on other hosts (WindowMail)
  std::vector<ReduceStep> reductions;  ///< writer only
};

/// The path of a file of the plan while it is being written, and its name in messages.
struct FileTarget {
  std::string name;
  std::string place;  ///< empty: the bytes are not kept, and only remainders are computed
  /// Where its tensors end, in ascending order; empty: no remainders of its tensors are wanted. Set like `place`.
  std::vector<std::uint64_t> ends = {};
};

/// All work of one process.
struct ProcessWork {
  std::vector<Step> steps;
  std::uint32_t turns = 0;    ///< number of its own windows
  std::uint64_t written = 0;  ///< bytes it writes
  std::uint64_t window_bytes = 0;
  std::uint32_t depth = 0;          ///< windows per writer
  std::string directory;            ///< of the files; set by the code that creates them
  std::vector<FileTarget> targets;  ///< one per file of the plan; set like `directory`
  /// The definition of this process's list of tensors; empty: the list is that of its shards. Set like `directory`.
  std::vector<ViewedTensor> views;
};

struct FilePlan {
  std::string name;
  std::string header;
  std::uint64_t bytes = 0;  ///< including the header
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
  Writers writers = Writers::all;
  std::uint64_t window_bytes = 8 << 20;
  std::uint32_t depth = 2;    ///< windows per writer
  bool all_have_all = false;  ///< every process has all tensors, of all ranks, so each item needs only one process
  /// The host of each process; empty: all are on one host. Processes of one host share memory.
  std::vector<int> hosts = {};
  /// Each file is written from one host only. If clients of a network file system write to one file at a time, they may
  /// overwrite each other's bytes in a shared page.
  bool one_host_a_file = false;

  [[nodiscard]] int host_of(int process) const { return hosts.empty() ? 0 : hosts[static_cast<std::size_t>(process)]; }
};

/// Computes headers, offsets and lengths only.
std::vector<FilePlan> plan_files(std::span<const OutputFile> files);

/// `equal` has sets of sources that must be bit-identical. `there` has the names of files that already exist.
AssemblyPlan plan_assembly(std::span<const OutputFile> files, std::span<const std::vector<SourceRef>> equal,
                           std::span<const RankSources> ranks, const AssemblyShape& shape,
                           const std::set<std::string>& there = {});

std::vector<std::byte> encode_work(const ProcessWork& work);
/// Throws Error(corrupt).
ProcessWork decode_work(std::span<const std::byte> bytes);

// Execution of a plan: every process runs its own steps, and all use one order.
//
//  1. Every process creates its windows and announces them to all others.
//  2. Every process runs its steps. direct: it writes from its tensors to the file. window: it copies its part into the
//     writer's window, or sends it (WindowMail). hash: it hashes a tensor; the hashes are compared at the end.
//  3. For its own windows, a second thread waits until all parts have arrived, reduces contributions, writes the item,
//     and releases the window.
//  4. A process that has written all its parts of a file syncs and closes it, and then publishes that count (the
//     stage) in shared memory. The first process of a host reports it to other hosts (WindowMail) before it begins with
//     the file after the next one.
//  5. Process 0 finishes files in their order, once all processes have completed them: header, fsync, the file's name.
// A failure of any process aborts the group of the assembly, so that every wait of every process ends at once.
//
// Processes cannot deadlock: consider the earliest item that is not written. A process that has not copied its part of
// it is in an earlier step, or waits for the window, which an earlier item occupies. The writer's thread waits for
// nothing else. A writer receives the parts from other hosts in its own steps, and then passes the item to its thread.

/// Creates a file of the plan in `directory`, at its full size and under a temporary name that no reader accepts.
FileTarget grow_file(const std::string& directory, const FilePlan& file);
/// Finishes a file of which everything except the header is on the disk. Writes the header last, because until then the
/// file begins with zeros, which no reader accepts. Then renames the file.
void finish_file(const FilePlan& file, const FileTarget& target);

/// The hash of a tensor's bytes on one process.
struct TensorHash {
  std::uint32_t set = 0;
  std::uint32_t tensor = 0;  ///< index in the process's list
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

/// Returns the hash for a step of kind hash.
TensorHash hash_for(const Step& step, const TensorSource& source);

/// Called on any thread when this process has completed a file, before other processes are informed.
using WrittenCallback = std::function<void(std::uint32_t file, const std::vector<WrittenPart>& parts)>;

/// Receives the bytes that this process would write to files, in the order of their offsets. Bytes that no call has are
/// zero. Each file must have a single writer. Called by one thread at a time.
using ItemSink = std::function<void(std::uint32_t file, std::uint64_t offset, std::span<const std::byte> bytes)>;

/// Called by process 0, in the order of the files, when all of a file except its header is on the disk.
using FinishFile = std::function<void(std::uint32_t file)>;

/// The results of a process.
struct Assembled {
  std::vector<TensorHash> hashes;  ///< of its tensors that must be compared
  /// By file and tensor, for files whose target has `ends`: the remainder of the bytes that this process has written
  /// (core/crc64.hpp). The XOR of those of all processes is the tensor's, because the other bytes are zero.
  std::vector<std::vector<std::uint64_t>> remainders;
};

/// Runs a plan. Collective over `group`, which a failing process aborts: pass a group for this call alone. `source` has
/// this process's tensors. With `on_written`, written bytes are hashed. With `sink`, it receives the bytes, and nothing
/// is written; the group must have several ranks. `finish` and `progress` are used on rank 0 only. Throws the first
/// failure of any rank.
Assembled assemble(Group& group, const ProcessWork& work, const TensorSource& source, const WrittenCallback& on_written,
                   const FinishFile& finish, const std::function<void(std::uint64_t bytes)>& progress,
                   const ItemSink& sink = {});

// Sends parts of windows from processes that do not share memory with the writer, as messages of any kind of group.
//
//  1. When the writer reaches an item and has a free window for it, it sends a credit to every such contributor.
//  2. A contributor that reaches the item waits for the credit, and then sends its rows, packed, in messages of bounded
//     size. Each message has the destination of its rows, and the last one is marked.
//  3. The writer copies them into the window.
//  4. At agreed points of the order, the first process of each host reports the number of files that its host and all
//     hosts below it in the tree of hosts have completed (the stage), and the number of bytes that they have written.
//     The first process of the host above receives the report. Process 0 is at the top.
//
// All processes handle items in one order, so messages between two of them arrive in the expected order. They cannot
// deadlock: consider the earliest unfinished item. Its writer waits for contributors that are at that item or before
// it, and they wait for their writer; neither waits for anything later. A wait for a stage depends only on
// items of earlier files.
//
// The credit ensures that a process sends only what the writer has a window for. A slow disk therefore slows the
// senders instead of filling memory.

// In a job of many hosts the messages are forwarded (BaseGroup::forward_packets), so that a process has connections to
// few others. The credit also bounds the packets on their way.

/// One process's side of this protocol. Used by the thread that uses the group.
class WindowMail {
 public:
  /// The limit of window bytes per message.
  static constexpr std::uint64_t piece_bytes(std::uint64_t window_bytes) noexcept {
    return std::min<std::uint64_t>(window_bytes / 4, 1 << 20);
  }

  WindowMail(Group& group, const TensorSource& source, std::uint64_t window_bytes);

  /// Runs step 2. Throws as Group::send and read_rows.
  void contribute(const Step& step);
  /// Runs steps 1 and 3. Throws as Group::receive, and Error(corrupt) on rows outside the window.
  void collect(const Step& step, std::span<std::byte> window);

  /// The message of step 4.
  struct StageReport {
    std::uint32_t files = 0;
    std::uint64_t bytes = 0;
  };
  void tell_stage(int above, const StageReport& stage);
  StageReport hear_stage(int from);

 private:
  void pack(const merge::Rectangle& copy, std::uint32_t turn, int writer);
  void send_piece(std::uint32_t turn, int writer, bool is_last);
  [[nodiscard]] bool take_piece(int from, std::uint32_t turn, std::span<std::byte> window);

  group::BaseGroup& group_;
  const TensorSource& source_;
  std::uint64_t piece_bytes_;
  std::vector<std::byte> piece_;  // the message that is being packed
};

}  // namespace muster
