// SPDX-License-Identifier: Apache-2.0
#pragma once
// The two gathers: layer configs and weight tensors of all ranks to the first rank.
// Semantics: get_configs_parallel and get_tensors_parallel of ModelOpt's `distribute` module, with these differences:
// an absent config keeps its place, the end of a result is local and never a barrier, and one rank's failure is every
// rank's error.

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
#include "muster/sync_group.hpp"
#include "muster/tensor.hpp"

namespace muster {

/// How bytes travel.
enum class Route : std::uint8_t {
  automatic,  ///< the policy chooses (MUSTER_ROUTE, where set, forces one)
  local,      ///< nobody's bytes move: the lists have one rank each
  shm,        ///< shared memory of one host
  workspace,  ///< state files in a directory that all ranks see
  mpi,        ///< MPI between hosts, shared memory inside the first rank's
  tcp,        ///< TCP between hosts, shared memory inside the first rank's
  device,     ///< from devices: to page-locked memory, or from device to device (muster/cuda.hpp)
};
std::string_view to_string(Route route) noexcept;

/// What the first rank's own ordinary tensors are in its result.
enum class Own : std::uint8_t {
  borrow,  ///< views of the caller's memory: no copy, valid as long as the caller keeps it
  copy,    ///< a snapshot like everybody else's
};

/// Where the tensors of a gather from devices are on the first rank.
enum class Landing : std::uint8_t {
  host,    ///< in its host memory, its own ones too
  device,  ///< on the device that its own tensors are on, or that CudaLanding names (muster/cuda.hpp)
};

struct GatherOptions {
  /// Through state files in a directory that all ranks see.
  struct Workspace {
    /// Made if it is not there; empty: no files. Given on all members of a list or on none; the paths may be spelled
    /// differently, what they lead to may not differ.
    std::string path = {};
    /// What every member gave stays there as a state file, durable, for inspection. The same on all.
    bool keep_files = false;
    std::optional<int> zstd_level = {};  ///< files are compressed; none: not
  };
  /// Of tensors on devices (muster/cuda.hpp).
  struct Devices {
    Landing landing = Landing::host;  ///< the same on all ranks
  };
  struct Debugging {
    bool check_leases = false;  ///< hash arena tensors when gathered and when released, log who wrote them between
  };

  Own own = Own::borrow;  ///< counts on the first rank
  /// On the first rank: what others have copied into shared memory for this exchange may be written to, as long as it
  /// is held; no other rank sees that. Tensors of arenas and of other routes are read-only all the same.
  bool writable = false;
  /// On the first rank, for tensors and merges: writable contiguous tensors of the host that the results are copied to,
  /// its own too, and that then are the results; one for each rank of the list, of a merge one. The senders' memory is
  /// free when the call returns. Empty: results are views of shared memory. Throws Error(argument) if they do not fit.
  std::vector<Tensor> into = {};
  Route route = Route::automatic;                         ///< the same on all ranks
  std::optional<std::chrono::milliseconds> timeout = {};  ///< none: the group's
  std::stop_token stop = {};                              ///< cancels this rank's waits, and so poisons the group
  int pipeline_depth = 2;  ///< results the first rank may hold before senders take extra segments
  std::uint64_t memory_budget =
      std::numeric_limits<std::uint64_t>::max();  ///< bytes of shared memory this rank may have in its pool, extra
                                                  ///< segments included
  std::uint64_t pool_limit =
      std::numeric_limits<std::uint64_t>::max();  ///< free bytes this rank's pool keeps for the next exchange
  Workspace workspace = {};
  Devices devices = {};
  Debugging debugging = {};
};

/// One step of an exchange on this rank.
struct PhaseReport {
  std::string name;  ///< "round 1", "copy", "receive", "round 2"
  double seconds = 0;
  std::uint64_t bytes = 0;        ///< payload moved by this rank in the step
  std::uint64_t copies = 0;       ///< how often each of these bytes was copied
  std::uint64_t page_faults = 0;  ///< minor faults of the calling thread, of steps that move bytes after round 1
};

struct ExchangeReport {
  Route route = Route::automatic;
  std::string reason;  ///< why this route
  std::vector<PhaseReport> phases;
  std::uint64_t payload_bytes = 0;  ///< tensor bytes of this rank's list
  std::uint64_t arena_bytes = 0;    ///< of these, bytes that did not move because they were in shared memory already
  std::uint64_t network_bytes = 0;  ///< tensor bytes that this rank sent or received by MPI or TCP
  std::uint64_t pool_bytes = 0;     ///< memory this rank's pools hold after the exchange
  std::uint64_t rounds = 0;         ///< all-gather rounds
};

namespace detail {
class ExchangeState;
/// Throws Error(argument): a result has no such entry.
[[noreturn]] void refuse_index(std::size_t index, std::size_t size);
}  // namespace detail

/// What an exchange left on this rank. The end of it is local, noexcept, on any thread, never collective. Movable, not
/// copyable. Tensors copied out of a result keep their sender's slot until they are gone too.
class Exchange {
 public:
  Exchange() = default;
  Exchange(Exchange&&) noexcept = default;
  Exchange& operator=(Exchange&&) noexcept = default;

  /// The list this rank was in; empty if it was in none.
  [[nodiscard]] const std::vector<int>& ranks() const noexcept { return ranks_; }
  /// On a sender: waits until the first rank no longer holds this rank's bytes, or is gone. Returns false at the
  /// deadline. At once elsewhere.
  bool wait_released(std::chrono::milliseconds timeout) const;
  /// One line: route, why, bytes, seconds.
  [[nodiscard]] std::string explain() const;
  [[nodiscard]] const ExchangeReport& report() const;

 protected:
  Exchange(std::vector<int> ranks, std::shared_ptr<detail::ExchangeState> state)
      : ranks_(std::move(ranks)), state_(std::move(state)) {}

 private:
  std::vector<int> ranks_;
  std::shared_ptr<detail::ExchangeState> state_;
};

/// The result of a gather: on the first rank one entry for each rank of the list, in its order; empty on all others.
template <class T>
class Gathered : public Exchange {
 public:
  Gathered() = default;
  Gathered(std::vector<int> ranks, std::vector<std::optional<T>> entries, std::shared_ptr<detail::ExchangeState> state)
      : Exchange(std::move(ranks), std::move(state)), entries_(std::move(entries)) {}

  /// Entries, absent ones counted: the length of the list on the first rank, 0 elsewhere.
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] bool empty() const noexcept { return entries_.empty(); }
  /// The entry of ranks()[index]; empty if that rank passed none. Throws Error(argument) past the end.
  [[nodiscard]] const std::optional<T>& operator[](std::size_t index) const& {
    if (index >= entries_.size()) detail::refuse_index(index, entries_.size());
    return entries_[index];
  }
  [[nodiscard]] std::optional<T> operator[](std::size_t index) && {
    if (index >= entries_.size()) detail::refuse_index(index, entries_.size());
    return std::move(entries_[index]);
  }
  /// (rank, value) of those that passed one, in the order of the list. Valid as long as the result; of a result that
  /// ends with the expression, the values themselves.
  [[nodiscard]] std::vector<std::pair<int, const T&>> present() const& {
    std::vector<std::pair<int, const T&>> values;
    for (std::size_t i = 0; i < entries_.size(); ++i)
      if (entries_[i]) values.emplace_back(ranks()[i], *entries_[i]);
    return values;
  }
  [[nodiscard]] std::vector<std::pair<int, T>> present() && {
    std::vector<std::pair<int, T>> values;
    for (std::size_t i = 0; i < entries_.size(); ++i)
      if (entries_[i]) values.emplace_back(ranks()[i], std::move(*entries_[i]));
    return values;
  }
  /// Ends the result now: slots return to their senders, unless tensors copied out of it still live.
  void release() noexcept { entries_.clear(); }

 private:
  std::vector<std::optional<T>> entries_;
};

using GatheredConfigs = Gathered<Config>;
using GatheredTensors = Gathered<Tensor>;

/// Collective over the group, one call by each rank. Members of a list pass the same list of ranks inside the
/// group, without duplicates; several disjoint lists may gather in one exchange; a rank that is not in the list it
/// passes (or passes an empty one) only takes part in the rounds. `config` may be null (none); it is read during the
/// call only, but with Own::borrow the first rank's own tensors stay views of it. The first rank, ranks[0], gets every
/// member's config; the others an empty result. Throws on all ranks alike, with the words of the rank that cannot go
/// on: Error(argument | rank_mismatch | no_space | io | unsupported) leave the group usable; Error(timeout | peer_lost
/// | cancelled) poison it.
GatheredConfigs get_configs_parallel(const Config* config, const RankList& ranks, SyncGroup& group,
                                     const GatherOptions& options = {});

/// As above with one tensor a rank, all of the same dtype and shape; where they differ, Error(rank_mismatch) on
/// every rank names each one's dtype and shape.
GatheredTensors get_tensors_parallel(const TensorView& tensor, const RankList& ranks, SyncGroup& group,
                                     const GatherOptions& options = {});

// The same over the world.
GatheredConfigs get_configs_parallel(const Config* config, const RankList& ranks = all_ranks);
GatheredTensors get_tensors_parallel(const TensorView& tensor, const RankList& ranks = all_ranks);

/// Gives the free shared memory of this rank's pool, and of its streams, back to the system; returns the bytes. Local.
/// What results hold stays.
std::uint64_t trim(SyncGroup& group);

}  // namespace muster
