// SPDX-License-Identifier: Apache-2.0
#pragma once
// How files are put together from tensors that several processes have: who copies what where, and who writes it.
//
// A file is cut into items, contiguous runs of its bytes. An item whose bytes come from its writer alone is direct: it
// goes from where it lies to the file. All others go through a window, a piece of the writer's shared memory in which
// every process puts its part, all in parallel; where tensors are reduced (max, sum), each puts a whole contribution
// beside it, and the writer reduces. All processes go through the items in one order, the files', which is why nobody
// waits for something that waits for him (assembly.hpp).

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "muster/export.hpp"
#include "muster/safetensors.hpp"
#include "src/checkpoint/arrangement.hpp"
#include "src/merge/layout.hpp"
#include "src/merge/rows.hpp"

namespace muster {

struct OutputTensor {
  std::string name;
  merge::Layout layout;
  std::vector<SourceRef> sources;         ///< those that the layout speaks of
  std::vector<std::uint32_t> equal = {};  ///< numbers of the sets that are compared when this tensor's turn comes
};

struct OutputFile {
  std::string name;
  std::map<std::string, std::string> metadata;
  std::vector<OutputTensor> tensors;
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
  std::vector<std::uint32_t> senders;  ///< the writer's: contributors on other hosts (window_mail.hpp)
  std::vector<ReduceStep> reductions;  ///< the writer's
};

/// What one process does in all.
struct ProcessWork {
  std::vector<Step> steps;
  std::uint32_t turns = 0;    ///< of its own windows
  std::uint64_t written = 0;  ///< bytes it writes
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
  std::uint64_t window_bytes = 0;
  std::uint64_t bytes = 0;  ///< of all tensors
};

/// Which process has a rank's tensors, and where in its list they begin.
struct RankSources {
  int process = 0;
  std::uint32_t first = 0;
};

struct AssemblyShape {
  int processes = 1;
  Writers writers = Writers::owners;
  std::uint64_t window_bytes = 8 << 20;
  /// The host of each process; empty: one of all. Processes of one host share memory.
  std::vector<int> hosts = {};
  /// All of a file is written on one host: clients of a network file system that write to one file at a time may undo
  /// each other's bytes, where these share a page.
  bool one_host_a_file = false;

  [[nodiscard]] int host_of(int process) const { return hosts.empty() ? 0 : hosts[static_cast<std::size_t>(process)]; }
};

/// Headers, places and lengths alone.
std::vector<FilePlan> plan_files(std::span<const OutputFile> files);

/// `equal`: sets of sources that must be bit for bit equal. `skip`: numbers of files that are there already.
AssemblyPlan plan_assembly(std::span<const OutputFile> files, std::span<const std::vector<SourceRef>> equal,
                           std::span<const RankSources> ranks, const AssemblyShape& shape,
                           const std::vector<bool>& skip = {});

std::vector<std::byte> encode_work(const ProcessWork& work);
/// Throws Error(corrupt).
ProcessWork decode_work(std::span<const std::byte> bytes);

}  // namespace muster
