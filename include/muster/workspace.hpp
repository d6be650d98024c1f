// SPDX-License-Identifier: Apache-2.0
#pragma once
// NFSWorkspace: a directory that all ranks see, in which each rank puts its state (a config and named weights) and
// reads those of others. And file_group(): ranks that share nothing but such a directory. Semantics: ModelOpt's
// NFSWorkspace, with these differences: a state has a generation and is complete or not there; two jobs in one
// directory do not meet unless an earlier one's states are asked for; and what is removed is a rank's own older states
// and what dead processes of its host left unfinished.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "muster/config.hpp"
#include "muster/state.hpp"
#include "muster/sync_group.hpp"

namespace muster {

struct WorkspaceOptions {
  /// zstd's level; none: not compressed.
  std::optional<int> zstd_level = {};
  /// Fsync before a state has its name. False: safe from killed processes, not from a power cut.
  bool durable = true;
  /// How many of this rank's newest states stay; earlier ones are removed when a new one is there. At least 1: two, so
  /// that a reader that was told of one still finds it while the next appears. Beside them stay the newest one that all
  /// ranks have and, once every rank has written, all from the slowest rank's newest generation on.
  int generations_kept = 2;
  /// How long stale handles, late directory entries and short files are tried again; none: the group's timeout.
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// What a rank wrote.
struct WorkspaceState {
  State state;                   ///< tensors live as long as they are held, whatever becomes of the file
  std::uint64_t generation = 0;  ///< which of the rank's states it is: the step that it was written with, or its count
  std::string path;              ///< the file it came from
  SyncGroup::Nonce job{};        ///< whose state it is: the nonce of its writer's group
  int world_size = 1;            ///< of that job
};

/// Whose states are read.
enum class WorkspaceJob : std::uint8_t {
  own,     ///< this group's
  newest,  ///< of all jobs that have what is asked for, the one that wrote it last: this one, or one before a restart
};

/// Which of a rank's states is read: the newest one for which all of this holds.
struct WorkspaceQuery {
  std::uint64_t at_least = 0;              ///< its generation, or a later one
  std::optional<std::uint64_t> step = {};  ///< this generation alone
  bool on_all_ranks = false;               ///< all ranks of the job have a state of its generation
  WorkspaceJob job = WorkspaceJob::own;
};

namespace detail {
struct WorkspaceGenerations;
}

/// All calls are local: there is no barrier inside. So a rank that has written knows nothing of the others, and
/// a reader may get the state before the last one: it asks for `at_least` a generation it has heard of (by a message or
/// a barrier of the group after writing), or names the step. One thread at a time. Copies, and later objects of the
/// same group and directory, go on where the earlier ones were.
class NFSWorkspace {
 public:
  /// Not initialised: writing and reading are Error(argument).
  NFSWorkspace() = default;
  /// Makes the directory (all ranks may). One rank of each host removes what processes of that host left unfinished
  /// that are proved dead; states stay, whoever wrote them. No path, or an empty one: not initialised. A null group:
  /// the world. Throws Error(io | no_space | argument) if the path cannot be a workspace: a file, a dangling link,
  /// no permission, a directory with a newer version's mark.
  explicit NFSWorkspace(const std::optional<std::string>& path, std::shared_ptr<SyncGroup> group = nullptr,
                        const WorkspaceOptions& options = {});

  [[nodiscard]] bool is_initialized() const noexcept { return group_ != nullptr; }
  /// Empty if not initialised.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  /// This rank's next state: there as a whole, or not at all. `config` may have tensors at its leaves, too: they become
  /// weights by split(), and then `weights` must be empty. With `weights`, the config is written as it is. Returns its
  /// generation, by which readers and `muster export` find what the ranks wrote together: `step`, which is larger than
  /// all that this rank has written in this job; without it, one more than this rank's last (1, 2, ...). A write that
  /// failed leaves nothing and uses no number up: without steps, try it again before the next one, or this rank's
  /// states no longer belong to the others' of the same number. Throws Error(argument) if not initialised, on names
  /// twice and on a step that is not larger; Error(no_space | io).
  std::uint64_t write_configs_and_weights(const Config& config, std::span<const NamedTensor> weights = {},
                                          std::optional<std::uint64_t> step = {});

  /// Any rank's newest complete state that `query` fits; none if there is none now (it does not wait). Throws
  /// Error(argument) if not initialised or if this group has no such rank (of other jobs any may be asked for);
  /// Error(not_found) if the directory is gone; Error(corrupt | version) on a state that is damaged; Error(io).
  [[nodiscard]] std::optional<WorkspaceState> read_configs_and_weights_from_rank(int rank, const WorkspaceQuery& query);
  [[nodiscard]] std::optional<WorkspaceState> read_configs_and_weights_from_rank(int rank, std::uint64_t at_least = 0) {
    return read_configs_and_weights_from_rank(rank, WorkspaceQuery{.at_least = at_least});
  }

 private:
  void require_initialized() const;
  void forget_earlier() const;

  std::string path_;
  std::shared_ptr<SyncGroup> group_;
  WorkspaceOptions options_;
  std::shared_ptr<detail::WorkspaceGenerations> generations_;
};

struct FileGroupOptions {
  std::string directory;  ///< a workspace that all ranks see; made if it is not there
  std::string key = {};   ///< what all ranks of the job know and no other job has; needed if several jobs may start
                          ///< in one directory at the same time
  int rank = 0;
  int size = 1;
  std::optional<std::chrono::milliseconds> timeout = {};  ///< of the meeting, and the group's default after it
  std::chrono::milliseconds heartbeat{1000};              ///< how often a rank tells that it lives
  std::chrono::milliseconds lost_after{30000};            ///< a rank that was silent that long is lost
};

/// A group of `size` processes that share nothing but a directory: rounds, messages and heartbeats are small files in
/// it. Some milliseconds a round on a local disk, as much as the server's caches allow elsewhere. Collective. Throws
/// Error(timeout) with the ranks that never came, Error(rank_mismatch) on double ranks, different sizes or two jobs
/// that meet, Error(argument | io | no_space) if the directory cannot be used.
std::shared_ptr<SyncGroup> file_group(const FileGroupOptions& options);

}  // namespace muster
