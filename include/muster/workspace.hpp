// SPDX-License-Identifier: Apache-2.0
#pragma once
// Workspace: a directory that all ranks see. Each rank writes its state (a config and named weights) there and reads
// the states of other ranks. file_group(): a group of ranks that share only such a directory. Semantics: NFSWorkspace
// of ModelOpt, with three differences. A state has a step, and readers see it completely or not at all. A job
// does not see the states of another job in the same directory, unless a query requests them. A workspace deletes only
// older states of the same rank, and unfinished files of dead processes of the same host.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "muster/config.hpp"
#include "muster/group.hpp"
#include "muster/state.hpp"

namespace muster {

/// Options of an Workspace.
struct WorkspaceOptions {
  /// The zstd compression level. Unset: no compression.
  std::optional<int> zstd_level = {};
  /// Calls fsync before a state gets its name. False: safe if the process is killed, but not after a power failure.
  bool durable = true;
  /// The number of the newest states of this rank that are kept, at least 1. Older ones are deleted when a new one is
  /// complete. With 2, a reader that has learned of one state still finds it while the next one appears. Two kinds of
  /// states are kept in addition: the newest step that all ranks have and, once every rank has written, all
  /// steps from the newest one of the slowest rank on.
  int steps_kept = 2;
  /// How long stale file handles, late directory entries and short files are retried. Unset: the timeout of the group.
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// A state that a rank wrote.
struct WorkspaceState {
  State state;             ///< its tensors remain valid as long as they are held, even if the file is deleted
  std::uint64_t step = 0;  ///< the `step` that was passed to the write, or a count
  std::string path;        ///< path of the file
  Group::Nonce job{};      ///< the nonce of the group of the writer
  int world_size = 1;      ///< number of ranks of that job
};

/// The jobs whose states are read.
enum class WorkspaceJob : std::uint8_t {
  own,     ///< the job of this group
  newest,  ///< among all jobs with a matching state, the one that wrote it last: this job, or one before a restart
};

/// Selects the newest state of a rank that meets all of these conditions.
struct WorkspaceQuery {
  std::uint64_t min_step = 0;              ///< the state has this step or a later one
  std::optional<std::uint64_t> step = {};  ///< the state has exactly this step
  bool on_all_ranks = false;               ///< all ranks of the job have a state of this step
  /// The jobs whose states are read.
  WorkspaceJob job = WorkspaceJob::own;
};

namespace detail {
struct WorkspaceSteps;
}

/// The states of the ranks of a group in one directory. All calls are local, without a barrier. A rank that has written
/// therefore does not know whether other ranks have written, and a reader may get the state before the last one. To get
/// a particular state, pass its step, or `min_step` a step that it learned from a message or after a barrier. One
/// thread at a time. Copies, and later objects of the same group and directory, continue the numbering of the earlier
/// ones.
class Workspace {
 public:
  /// Creates an uninitialized workspace, whose reads and writes throw Error(invalid_argument).
  Workspace() = default;
  /// Opens the directory `path` and creates it if it does not exist; all ranks may do so. One rank per host deletes
  /// unfinished files of processes of that host that are proved dead. States are kept, whichever job wrote them.
  /// Without a path, or with an empty one, the workspace is uninitialized. A null group means world(). Throws Error(io
  /// | out_of_space | argument) if the path cannot be a workspace: a file, a dangling link, missing permissions, or a
  /// directory with the marker of a newer version.
  explicit Workspace(const std::optional<std::string>& path, std::shared_ptr<Group> group = nullptr,
                     const WorkspaceOptions& options = {});

  /// Returns whether the workspace has a directory.
  [[nodiscard]] bool is_initialized() const noexcept { return group_ != nullptr; }
  /// Returns the directory; empty if uninitialized.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  /// Writes the next state of this rank. It appears completely or not at all. Returns its step, with which
  /// readers and `muster export` find the states that the ranks wrote together. The step is `step`, which must be
  /// larger than all that this rank has written in this job. Without `step` it is one more than the last one of this
  /// rank (1, 2, ...).
  ///
  /// `config` may have tensors as leaves if `weights` is empty; split() then turns them into weights. With `weights`,
  /// the config is written unchanged. A failed write leaves no file and does not use up a number. Without steps, repeat
  /// a failed write before the next one, because otherwise equal steps of different ranks no longer belong
  /// together. Throws Error(invalid_argument) if the workspace is uninitialized, a name occurs twice or `step` is not
  /// larger; Error(out_of_space | io).
  std::uint64_t write_configs_and_weights(const Config& config, std::span<const NamedTensor> weights = {},
                                          std::optional<std::uint64_t> step = {});

  /// Returns the newest complete state of `rank` that matches `query`; nullopt if no such state exists now. It does not
  /// wait for one. Throws Error(invalid_argument) if the workspace is uninitialized, or if this group has no such rank
  /// (for other jobs, any rank is allowed). Throws Error(not_found) if the directory no longer exists, Error(corrupt |
  /// version) if a state is damaged, and Error(io).
  [[nodiscard]] std::optional<WorkspaceState> read_configs_and_weights_from_rank(int rank, const WorkspaceQuery& query);
  /// Returns the newest complete state of `rank` whose step is `min_step` or later. Otherwise as the function above.
  [[nodiscard]] std::optional<WorkspaceState> read_configs_and_weights_from_rank(int rank, std::uint64_t min_step = 0) {
    return read_configs_and_weights_from_rank(rank, WorkspaceQuery{.min_step = min_step});
  }

 private:
  void require_initialized() const;
  void forget_earlier() const;

  std::string path_;
  std::shared_ptr<Group> group_;
  WorkspaceOptions options_;
  std::shared_ptr<detail::WorkspaceSteps> steps_;
};

/// The name of the class in ModelOpt.
using NFSWorkspace = Workspace;

/// Options of file_group().
struct FileGroupOptions {
  std::string directory;  ///< a workspace that all ranks see; it is created if it does not exist
  /// Identifies the job: the same on all its ranks and different from other jobs; required if several jobs may start in
  /// one directory at the same time.
  std::string key = {};
  /// The rank of this process.
  int rank = 0;
  /// The number of ranks.
  int size = 1;
  /// For the rendezvous; afterwards the default deadline of the group.
  std::optional<std::chrono::milliseconds> timeout = {};
  std::chrono::milliseconds heartbeat{1000};    ///< interval of the heartbeats of a rank
  std::chrono::milliseconds lost_after{30000};  ///< a rank without a heartbeat for this time is lost
};

/// Returns a group of `size` processes that share only a directory. Collective. Rounds, messages and heartbeats are
/// small files in it. A round takes a few milliseconds on a local disk; on a network file system the caches of the
/// server determine it. Throws Error(timeout) with the ranks that did not arrive. Throws Error(rank_mismatch) if two
/// processes have the same rank, if ranks disagree about the size, or if two jobs use the same key. Throws
/// Error(invalid_argument | io | out_of_space) if the directory cannot be used.
std::shared_ptr<Group> file_group(const FileGroupOptions& options);

}  // namespace muster
