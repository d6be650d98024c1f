// SPDX-License-Identifier: Apache-2.0
#pragma once
// Streaming: layer after layer of every rank to the first rank, within a budget of shared memory. While the first
// rank uses a layer, the senders prepare the next one. Semantics: get_configs_parallel in a loop over the layers
// (ModelOpt's `distribute` in its export), without a barrier for each layer and without a layer that must fit.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "muster/config.hpp"
#include "muster/gather.hpp"
#include "muster/sync_group.hpp"
#include "muster/tensor.hpp"
#include "muster/units.hpp"

namespace muster {

/// Where a piece of a tensor belongs that did not fit into one part. Its elements lie one after another in the whole,
/// row-major: [first, first + elements). If a row (one step of dimension 0) fits into a part, the piece is some rows
/// and has their shape; else it is a flat run of elements, of shape {elements}.
struct TensorSlice {
  int rank = 0;
  std::string path;  ///< of the leaf, as a JSON pointer (RFC 6901): "/mlp/weight"; "" where the layer is one tensor
  TensorSpec whole;  ///< the tensor that it is a piece of
  std::int64_t first = 0;  ///< in elements
  std::int64_t elements = 0;
};

/// A tensor of a layer, in however many parts it comes.
struct LayerTensor {
  int rank = 0;
  std::string path;  ///< as in TensorSlice
  TensorSpec whole;
};

/// A layer, or a part of one that is larger than the budget allows. Each part of a layer has the same tree, with what
/// travels in this part; every other leaf is null. Leaves that are no tensors come in part 0. Tensors are in one part
/// each, but those that are larger than a part: `slices` tells where their pieces belong.
struct LayerPart {
  std::uint64_t layer = 0;
  std::uint32_t part = 0;
  std::uint32_t parts = 1;  ///< the greatest number of any rank; ranks with fewer are absent from the later ones
  std::vector<int> ranks;   ///< the list
  std::vector<std::optional<Config>> configs;  ///< of ranks[i]; empty if that rank has nothing in this layer or part
  std::vector<TensorSlice> slices;             ///< in the order of the list, then of the tree
  std::vector<LayerTensor> tensors;            ///< of part 0: all tensors of the layer, in that order; later none

  [[nodiscard]] bool is_last() const noexcept { return part + 1 == parts; }
  /// (rank, config) of those that are there, in the order of the list. Valid as long as this part.
  [[nodiscard]] std::vector<std::pair<int, const Config&>> present() const {
    std::vector<std::pair<int, const Config&>> values;
    for (std::size_t i = 0; i < configs.size(); ++i)
      if (configs[i]) values.emplace_back(ranks[i], *configs[i]);
    return values;
  }
};

/// Gives this rank's next layer; none: there are no more. A null config keeps its place, as a rank that has nothing in
/// this layer.
using LayerSource = std::function<std::optional<Config>()>;
/// Takes a part on the first rank. What it does not copy or move out goes back to the senders when it returns.
using LayerConsumer = std::function<void(LayerPart& part)>;

struct StreamOptions {
  /// As in GatherOptions. Then memory_budget bounds what each sender has in files, and what a consumer keeps holds no
  /// sender up: a part is the first rank's own when it is consumed.
  struct Workspace {
    std::string path = {};
    std::optional<int> zstd_level = {};
  };

  /// Bytes of memory for parts that are under way or being consumed, at any moment, in equal shares of the senders: the
  /// senders' shared memory, and the first rank's own for what other hosts send. The same on all members.
  std::uint64_t memory_budget = 256_MiB;
  /// Parts that a sender may have under way: 1 prepares nothing ahead. The same on all members.
  int pipeline_depth = 2;
  Route route = Route::automatic;                         ///< the same on all members
  std::optional<std::chrono::milliseconds> timeout = {};  ///< none: the group's
  std::stop_token stop = {};                              ///< cancels this rank, and so poisons the group
  Workspace workspace = {};
  GatherOptions::Debugging debugging = {};
};

/// What a stream did on this rank.
struct StreamReport {
  Route route = Route::automatic;
  std::string reason;                 ///< why this route
  std::uint64_t layers = 0;           ///< given by this rank's source
  std::uint64_t parts = 0;            ///< sent; on the first rank: consumed
  std::uint64_t bytes = 0;            ///< tensor bytes sent; on the first rank: received from all
  std::uint64_t arena_bytes = 0;      ///< of these, bytes that did not move because they were in shared memory already
  std::uint64_t rounds = 0;           ///< all-gather rounds: 2, and 2 more where the group's first stream sets up
  std::uint64_t part_bytes = 0;       ///< the most tensor bytes of one rank in a part
  double seconds = 0;                 ///< the whole call
  double seconds_waiting = 0;         ///< for the first rank to give a part back; on the first rank: for parts
  std::uint64_t peak_slot_bytes = 0;  ///< the most memory for parts that this rank had at any moment, page-locked, too
};

/// Collective over the group, one call by each rank. `ranks` is a list as in get_configs_parallel: the same on all its
/// members, disjoint from other lists; a rank that is in none takes part in the opening and the closing round only (its
/// source and consumer are not called and may be empty). Every member has a source; all sources of a list give the same
/// number of layers. `consume` is called on the first rank, ranks[0], for part after part of layer after layer, in
/// order, with every member's config; the first rank's own tensors are views of its own memory, cut like the others'.
/// Elsewhere it may be empty. The calls are on the calling thread, and must not use this group (other than progress(),
/// rank() and the like); another one, made by duplicate(), they may.
///
/// Senders run ahead by pipeline_depth parts and then wait until the first rank has given the oldest back. What the
/// consumer keeps (copies of a Tensor) keeps the memory of that part: its sender stops pipeline_depth parts later,
/// until the consumer lets it go, on any thread. Parts without bytes in shared memory (no tensors, absent configs) are
/// not counted and bounded by the message buffer (some 256 KiB); from other hosts they count as well. A sender's
/// tensors are its own again when it is asked for the next layer, those in a SharedArena when their leases end (on the
/// first rank's host they move as names and are never cut). A strided tensor whose rows do not fit into a part costs
/// one part of ordinary memory more. Tensors on devices (muster/cuda.hpp) are brought to the host part by part, after
/// what is queued on this thread's stream; on the first rank, on senders of other hosts and where a layer has tensors
/// of both kinds that takes one part of page-locked memory more, which the budget does not count. Other hosts' parts
/// come in beside the consumer where any thread may call MPI (MPI_THREAD_MULTIPLE), else between its calls and inside
/// of group.progress().
///
/// Where less memory is available than the budgets of all lists together, the budgets are cut to what there is.
/// Memory is kept for the next stream of this group; trim() gives it back. What a consumer has kept of an earlier
/// stream no longer counts.
///
/// Deadlines count from the last progress of the rank that is waited for: each call of source and consume is progress
/// at its begin and end, and one that takes longer than the deadline calls group.progress() meanwhile.
///
/// Throws on all ranks alike, as the other gathers do. Error(argument | rank_mismatch | no_space | unsupported) leave
/// the group usable: lists, options, and sources of different lengths (the words say who had how many). So does what a
/// source or a consumer throws: every rank throws an Error with the origin's rank, host and words (the kind of an
/// Error, else Error(io)). Error(timeout | peer_lost | cancelled) of the stream itself poison the group,
/// and so does a rank that cannot set up a group's first stream (no descriptors, no memory).
StreamReport gather_each(const LayerSource& source, const RankList& ranks, SyncGroup& group,
                         const LayerConsumer& consume, const StreamOptions& options = {});

}  // namespace muster
