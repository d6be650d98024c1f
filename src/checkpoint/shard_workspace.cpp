// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/shard_workspace.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "muster/error.hpp"
#include "muster/model_dir.hpp"
#include "muster/state_file.hpp"
#include "src/checkpoint/merged_tensor.hpp"
#include "src/checkpoint/metadata_config.hpp"
#include "src/checkpoint/model_files.hpp"
#include "src/core/parallel.hpp"
#include "src/core/progress_counter.hpp"
#include "src/core/quoted.hpp"
#include "src/os/file.hpp"
#include "src/os/process.hpp"
#include "src/workspace/gc.hpp"
#include "src/workspace/names.hpp"
#include "src/workspace/workspace_directory.hpp"

namespace muster {
namespace {

constexpr std::uint64_t piece_bytes = 8 << 20;

// Step 1.
void check_carried_files(const std::string& from, const std::string& to, std::span<const std::string> names) {
  for (const std::string& name : names) {
    const std::string target = join_path(to, name);
    std::error_code error;
    if (!std::filesystem::exists(target, error)) continue;
    const auto mine = os::MappedFile::open(join_path(from, name));
    const auto there = os::MappedFile::open(target);
    if (std::ranges::equal(mine->bytes(), there->bytes())) continue;
    throw Error(
        ErrorKind::argument,
        fmt::format("sharding into the workspace {}: it has another {}; --force replaces it, or take a workspace "
                    "of its own",
                    in_quotes(to), in_quotes(name)),
        {.path = target});
  }
}

std::vector<MergedTensor> merged_tensors(const OutputFile& rank, std::span<const AssemblySource> sources) {
  std::vector<MergedTensor> tensors;
  for (const OutputTensor& output : rank.tensors) {
    MergedTensor& tensor = tensors.emplace_back(MergedTensor{output.name, output.layout, {}, {}, {}});
    for (const SourceRef& source : output.sources) {
      tensor.sources.push_back(sources[source.index]);
      tensor.ranks.push_back(source.rank);
    }
  }
  return tensors;
}

std::uint64_t bytes_of(const merge::Layout& layout) {
  return byte_size(layout.target.dtype, layout.target.shape);
}

void write_state(const OutputFile& rank, std::span<const AssemblySource> sources, const std::string& path,
                 const StateFileOptions& options, ProgressCounter& progress) {
  const std::vector<MergedTensor> tensors = merged_tensors(rank, sources);
  std::vector<StateFileWriter::Entry> entries;
  entries.reserve(tensors.size());
  for (const MergedTensor& tensor : tensors)
    entries.push_back({tensor.name, tensor.layout.target.dtype, tensor.layout.target.shape});
  StateFileWriter writer(path, config_from_metadata(rank.metadata), std::move(entries), options);
  // One thread a tensor: pieces that do not end with a chunk must come in their order.
  parallel_for(tensors.size(), copy_workers(), [&](std::size_t index, std::size_t) {
    const MergedTensor& tensor = tensors[index];
    const merge::Rows rows = merge::rows_of(tensor.layout);
    const std::uint64_t bytes = bytes_of(tensor.layout);
    std::vector<std::byte> piece(std::min(bytes, piece_bytes));
    for (std::uint64_t at = 0; at < bytes; at += piece_bytes) {
      const std::span<std::byte> part = std::span(piece).first(std::min(piece_bytes, bytes - at));
      read_merged(tensor, rows, at, part);
      writer.write(index, at, part);
      progress.add(part.size());
    }
  });
  writer.commit();
}

/// Files that go again unless all is well.
class Undo {
 public:
  Undo() = default;
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;
  ~Undo() {
    std::error_code error;
    for (const std::string& path : paths_) std::filesystem::remove(path, error);
  }
  void add(std::string path) { paths_.push_back(std::move(path)); }
  void forget() noexcept { paths_.clear(); }

 private:
  std::vector<std::string> paths_;
};

}  // namespace

WorkspaceShards write_shards_to_workspace(std::span<const OutputFile> ranks, std::span<const AssemblySource> sources,
                                          const std::string& model_dir, const std::string& path,
                                          const ShardOptions& options) {
  const std::string workspace = workspace::prepare_workspace(path).path;
  CarriedFiles carried = carried_files(model_dir, options.carry);
  if (!options.force) check_carried_files(model_dir, workspace, carried.names);
  SyncGroup::Nonce nonce{};
  os::random_bytes(nonce);
  WorkspaceShards result{workspace::job_text(nonce), 0, std::move(carried.left)};
  for (const OutputFile& rank : ranks)
    for (const OutputTensor& tensor : rank.tensors) result.bytes += bytes_of(tensor.layout);
  ProgressCounter progress(options.progress, result.bytes, options.stop);
  const int world_size = static_cast<int>(ranks.size());
  Undo undo;
  workspace::sweep_dead(workspace);
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string name = workspace::file_name({.kind = workspace::NameKind::state,
                                                   .job = result.job,
                                                   .rank = rank,
                                                   .world_size = world_size,
                                                   .generation = 1});
    StateFileOptions state;
    state.info = {nonce, 1, rank, world_size};
    state.zstd_level = options.zstd_level;
    state.temporary = workspace::growing_name();
    const std::string target = join_path(workspace, name);
    // The directory may be what could not be synced: then the name is there, too.
    undo.add(target);
    write_state(ranks[static_cast<std::size_t>(rank)], sources, target, state, progress);
  }
  for (const std::string& name : carried.names) {
    std::error_code error;
    const std::string target = join_path(workspace, name);
    if (!std::filesystem::exists(target, error)) undo.add(target);
  }
  copy_carried_files(model_dir, workspace, carried.names, [&] { progress.add(0); });
  undo.forget();
  return result;
}

}  // namespace muster
