// SPDX-License-Identifier: Apache-2.0
#pragma once
// Gathers the layer configs or the weight tensors of all ranks of a list on the root. The root is the first rank of the
// list, and the other ranks of the list are its senders. Semantics: get_configs_parallel and get_tensors_parallel of
// ModelOpt's `distribute` module, with three differences. A rank without a config keeps its entry in the result.
// Releasing a result is a local operation, never a barrier. An error on one rank is thrown on every rank.
//
// An exchange is one such call, made by all ranks of the group together. It consists of one or more rounds, in which
// every rank contributes a small record and receives the conclusions, and of the transfer of the data. Over shared
// memory, each sender copies its data into a segment of its own. The result on the root refers to the segments. A
// sender keeps free segments in a pool for the next exchange. docs/howto/gather-in-cpp.md is the manual.

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "muster/config.hpp"
#include "muster/group.hpp"
#include "muster/tensor.hpp"

namespace muster {

/// How the bytes of an exchange are transferred.
enum class Route : std::uint8_t {
  auto_,      ///< Muster chooses the route; MUSTER_ROUTE, if set, overrides the choice
  local,      ///< no transfer: each list has one rank
  shm,        ///< shared memory of one host
  workspace,  ///< state files in a directory that all ranks see
  mpi,        ///< MPI between hosts, shared memory on the root's host
  tcp,        ///< TCP between hosts, shared memory on the root's host
  device,     ///< GPU tensors: to page-locked host memory, or from GPU to GPU (muster/cuda.hpp)
};
/// Returns the name of a route, as MUSTER_ROUTE accepts it.
std::string_view to_string(Route route) noexcept;

/// How the root's own tensors appear in its result. With `borrow`, a Tensor of a config that owns its memory, such as
/// one from a SharedArena, shares the memory with the result.
enum class RootTensors : std::uint8_t {
  borrow,  ///< views of the caller's memory, without a copy; the caller keeps that memory while it uses the result
  copy,    ///< a copy, as for the tensors of the other ranks
};

/// Selects the memory in which the root receives the tensors of a gather from GPUs.
enum class Destination : std::uint8_t {
  host,    ///< in host memory, the root's own tensors too
  device,  ///< on the GPU that holds the root's own tensors
};

/// Options of gathers and merges. Unless a comment states otherwise, an option may differ between ranks, and applies to
/// the rank that passes it.
struct GatherOptions {
  /// Transfers the data through state files in a directory that all ranks see.
  struct Workspace {
    /// The directory. It is created if it does not exist. Empty: no files are used. Either all members of a list set it
    /// or none does. Members may spell the path differently, but the paths must lead to the same directory.
    /// The root checks each file except the elements of uncompressed tensors. `muster verify` checks whole kept files.
    std::string path = {};
    /// Keeps the contribution of every member in the directory as a durable state file, for inspection. The same on all
    /// members.
    bool keep_files = false;
    std::optional<int> zstd_level = {};  ///< compression level of the files; unset: no compression
  };
  /// Options for tensors on GPUs (muster/cuda.hpp).
  struct Devices {
    Destination destination = Destination::host;  ///< the same on all ranks
  };
  /// Checks that find errors in programs, at the cost of time.
  struct Debug {
    /// Hashes arena tensors when they are gathered and when they are released, and logs which tensors were written in
    /// between.
    bool detect_writes = false;
  };

  RootTensors root_tensors = RootTensors::borrow;  ///< used on the root only
  /// Root only: makes the copies in shared memory of the other ranks' tensors writable while the result holds them. The
  /// other ranks do not see these writes. Tensors of arenas, and tensors of the other routes, remain read-only.
  bool writable = false;
  /// Root only, for tensors and merges: writable contiguous tensors in host memory that receive the results, the root's
  /// own included. The result then consists of these tensors. Pass one per rank of the list, or one for a merge. The
  /// memory of the senders is released when the call returns. Empty: results are views of shared memory. Throws
  /// Error(invalid_argument) if the tensors do not fit.
  std::vector<Tensor> into = {};
  Route route = Route::auto_;  ///< the same on all ranks
  /// Longest wait without progress; unset: the default of the group.
  std::optional<std::chrono::milliseconds> timeout = {};
  std::stop_token stop = {};  ///< a stop request cancels the waits of this rank, and so aborts the group
  int pipeline_depth = 2;     ///< number of results that the root may hold before senders allocate extra segments
  /// The limit, in bytes, of the shared memory in the pool of this rank, extra segments and segments of results
  /// included.
  std::uint64_t memory_budget = std::numeric_limits<std::uint64_t>::max();
  /// The limit, in bytes, of the free memory that the pool of this rank keeps for the next exchange.
  std::uint64_t pool_limit = std::numeric_limits<std::uint64_t>::max();
  /// Options of the transfer through files.
  Workspace workspace = {};
  /// Options for tensors on GPUs.
  Devices devices = {};
  /// Checks for programs under development.
  Debug debug = {};
};

/// Measurements of one step of an exchange on this rank.
struct PhaseReport {
  /// "prepare", "round 1", then "copy" or "send" on a sender, "receive" on other ranks, or "merge", then "round 2" if
  /// there is one, and "deliver".
  std::string name;
  /// Duration of the step.
  double seconds = 0;
  std::uint64_t bytes = 0;        ///< payload bytes that this rank moved in the step
  std::uint64_t copies = 0;       ///< how many times each of these bytes was copied
  std::uint64_t page_faults = 0;  ///< minor faults of the calling thread, for steps that move bytes after round 1
};

/// Measurements of an exchange on this rank.
struct ExchangeReport {
  /// The route that transferred the tensors.
  Route route = Route::auto_;
  std::string reason;  ///< why this route was chosen
  /// The steps of the exchange, in order.
  std::vector<PhaseReport> phases;
  std::uint64_t payload_bytes = 0;  ///< tensor bytes of all ranks of the list of this rank
  std::uint64_t arena_bytes = 0;    ///< the part of payload_bytes that was already in shared memory and did not move
  std::uint64_t network_bytes = 0;  ///< tensor bytes that this rank sent or received over MPI or TCP
  std::uint64_t pool_bytes = 0;     ///< bytes of the pools of this rank after the exchange, in use or free
  std::uint64_t rounds = 0;         ///< number of rounds
};

namespace detail {
class ExchangeState;
/// Throws Error(invalid_argument), because the result has no entry `index`.
[[noreturn]] void refuse_index(std::size_t index, std::size_t size);
/// Returns the position of `rank` in the list. Throws Error(invalid_argument) if it is not less than `size`.
std::size_t position_of(int rank, const std::vector<int>& ranks, std::size_t size);
}  // namespace detail

/// Base class of the results of gathers and merges. The destructor is local and noexcept, does not wait, and may run on
/// any thread. Movable, not copyable. A Tensor that is copied out of a result keeps the memory of its sender until that
/// Tensor is destroyed.
class ExchangeResult {
 public:
  ExchangeResult() = default;
  ExchangeResult(ExchangeResult&&) noexcept = default;
  ExchangeResult& operator=(ExchangeResult&&) noexcept = default;

  /// Returns the list of this rank; empty if it was in no list.
  [[nodiscard]] const std::vector<int>& ranks() const noexcept { return ranks_; }
  /// On a sender: waits until the root has released the data of this rank, or until the process of the root has ended.
  /// Returns false if `timeout` passes first. On all other ranks it returns true at once. Local.
  bool wait_released(std::chrono::milliseconds timeout) const;
  /// Returns a one-line summary: route, reason, bytes and seconds.
  [[nodiscard]] std::string explain() const;
  /// Returns measurements of the exchange on this rank. Valid as long as this object. Local.
  [[nodiscard]] const ExchangeReport& report() const;

 protected:
  /// Creates a result; only the library calls this.
  ExchangeResult(std::vector<int> ranks, std::shared_ptr<detail::ExchangeState> state)
      : ranks_(std::move(ranks)), state_(std::move(state)) {}

 private:
  std::vector<int> ranks_;
  std::shared_ptr<detail::ExchangeState> state_;
};

/// The result of a gather. On the root it has one entry for each rank of the list, in the order of the list. On all
/// other ranks it is empty.
template <class T>
class GatherResult : public ExchangeResult {
 public:
  GatherResult() = default;
  /// Creates a result; only the library calls this.
  GatherResult(std::vector<int> ranks, std::vector<std::optional<T>> entries,
               std::shared_ptr<detail::ExchangeState> state)
      : ExchangeResult(std::move(ranks), std::move(state)), entries_(std::move(entries)) {}

  /// Returns the number of entries, empty ones included: the length of the list on the root, 0 on the other ranks.
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  /// Returns whether there are no entries.
  [[nodiscard]] bool empty() const noexcept { return entries_.empty(); }
  /// Returns the entry of rank ranks()[index]. It is empty if that rank passed null. Throws Error(invalid_argument) if
  /// `index` is not less than size().
  [[nodiscard]] const std::optional<T>& operator[](std::size_t index) const& {
    if (index >= entries_.size()) detail::refuse_index(index, entries_.size());
    return entries_[index];
  }
  /// Moves the entry out of a temporary result.
  [[nodiscard]] std::optional<T> operator[](std::size_t index) && {
    if (index >= entries_.size()) detail::refuse_index(index, entries_.size());
    return std::move(entries_[index]);
  }
  /// Returns the entry of a rank of the group. It is empty if that rank passed null. Throws Error(invalid_argument) if
  /// the rank is not in the list, or if this rank is not the root.
  [[nodiscard]] const std::optional<T>& by_rank(int rank) const& {
    return entries_[detail::position_of(rank, ranks(), entries_.size())];
  }
  /// Moves the entry of a rank out of a temporary result.
  [[nodiscard]] std::optional<T> by_rank(int rank) && {
    return std::move(entries_[detail::position_of(rank, ranks(), entries_.size())]);
  }
  /// Returns (rank, value) for each rank that passed a value, in the order of the list. The references are valid as
  /// long as the result. Called on a temporary result, it returns the values themselves.
  [[nodiscard]] std::vector<std::pair<int, const T&>> present() const& {
    std::vector<std::pair<int, const T&>> values;
    for (std::size_t i = 0; i < entries_.size(); ++i)
      if (entries_[i]) values.emplace_back(ranks()[i], *entries_[i]);
    return values;
  }
  /// Moves the values out of a temporary result.
  [[nodiscard]] std::vector<std::pair<int, T>> present() && {
    std::vector<std::pair<int, T>> values;
    for (std::size_t i = 0; i < entries_.size(); ++i)
      if (entries_[i]) values.emplace_back(ranks()[i], std::move(*entries_[i]));
    return values;
  }
  /// Releases the result now. The senders get their memory back, except for tensors that were copied out of the result
  /// and still exist.
  void release() noexcept { entries_.clear(); }

 private:
  std::vector<std::optional<T>> entries_;
};

/// The result of get_configs_parallel().
using GatheredConfigs = GatherResult<Config>;
/// The result of get_tensors_parallel().
using GatheredTensors = GatherResult<Tensor>;

/// Gathers the config of every member of a list on the root, ranks[0]. Collective over the group: every rank of the
/// group makes this call, whether it is in a list or not.
///
/// All members of a list pass the same list: ranks of the group, without duplicates. Several disjoint lists may gather
/// in one exchange. A rank that is not in the list it passes, or passes an empty list, only takes part in the rounds,
/// and gets an empty result.
///
/// `config` may be null if this rank has no config. It is read only during the call. Exception: with
/// RootTensors::borrow, the result of the root refers to the root's own tensors. The root receives one entry per
/// member; the other ranks receive an empty result.
///
/// Errors are thrown on all ranks alike, with the message of the rank that failed. After Error(invalid_argument |
/// rank_mismatch | out_of_space | io | unsupported) the group remains usable. Error(timeout | peer_lost | cancelled)
/// aborts the group.
GatheredConfigs get_configs_parallel(const Config* config, const RankList& ranks, Group& group,
                                     const GatherOptions& options = {});

/// Gathers one tensor of each member of a list on the root. All tensors of a list have the same dtype and shape; if
/// not, every rank throws Error(rank_mismatch) with the dtype and shape of each rank. Otherwise as
/// get_configs_parallel().
GatheredTensors get_tensors_parallel(const TensorView& tensor, const RankList& ranks, Group& group,
                                     const GatherOptions& options = {});

/// Gathers over all ranks of world(). Otherwise as the calls above.
GatheredConfigs get_configs_parallel(const Config* config, const RankList& ranks = all_ranks);
/// Gathers one tensor of each rank over all ranks of world().
GatheredTensors get_tensors_parallel(const TensorView& tensor, const RankList& ranks = all_ranks);

/// Frees the unused memory of this rank in `group`: that of its pool, that of its streams (gather_each.hpp), and that
/// of asynchronous exports (live_export.hpp). Memory that results or running exports still hold is kept. Returns the
/// number of bytes that were freed. Local.
std::uint64_t trim(Group& group);

}  // namespace muster
