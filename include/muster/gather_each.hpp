// SPDX-License-Identifier: Apache-2.0
#pragma once
// Streams one layer after the other from all ranks to the root, within a budget of shared memory. While the root uses a
// layer, the senders prepare the next one. Semantics: get_configs_parallel in a loop over the layers, as in the export
// of ModelOpt. In contrast to that loop, there is no barrier between layers, and a layer may be larger than the memory
// budget.

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
#include "muster/group.hpp"
#include "muster/tensor.hpp"
#include "muster/units.hpp"

namespace muster {

/// The position of a slice of a tensor that does not fit into one part. The elements of a slice are contiguous in the
/// whole tensor, in row-major order: [offset, offset + elements). If a row (one step of dimension 0) fits into a part,
/// the slice consists of rows and has their shape. Otherwise it is a flat run of elements of shape {elements}.
struct TensorSlice {
  /// The rank that sent the slice.
  int rank = 0;
  /// Path of the leaf, as a JSON pointer (RFC 6901): "/mlp/weight"; "" if the layer is a single tensor.
  std::string path;
  TensorSpec tensor;        ///< dtype and shape of the whole tensor
  std::int64_t offset = 0;  ///< offset in the whole tensor, in elements
  /// Number of elements of the slice.
  std::int64_t elements = 0;
};

/// A tensor of a layer, however many parts carry it.
struct LayerTensor {
  /// The rank that sent the tensor.
  int rank = 0;
  std::string path;  ///< as in TensorSlice
  /// The dtype and shape of the tensor.
  TensorSpec whole;
};

/// A layer, or one part of a layer that exceeds the memory budget. All parts of a layer have the same tree. A leaf that
/// is not in this part is null. Leaves that are not tensors are in part 0. A tensor is contained in a single part,
/// unless it is larger than a part; `slices` then gives the positions of its slices.
struct LayerPart {
  /// Number of the layer, from 0.
  std::uint64_t layer = 0;
  /// Number of the part in the layer, from 0.
  std::uint32_t part = 0;
  /// The largest number of parts of any rank; a rank with fewer parts has no entry in the later ones.
  std::uint32_t num_parts = 1;
  std::vector<int> ranks;  ///< the ranks of the list
  /// One per entry of `ranks`; empty if that rank has nothing in this layer or part.
  std::vector<std::optional<Config>> configs;
  std::vector<TensorSlice> slices;  ///< ordered by rank of the list, then by the tree
  /// Part 0 only: all tensors of the layer, in the order of `slices`; empty in later parts.
  std::vector<LayerTensor> tensors;

  /// Returns whether this is the last part of the layer.
  [[nodiscard]] bool is_last() const noexcept { return part + 1 == num_parts; }
  /// Returns the entry of a rank of the group. It is empty if that rank has nothing in this layer or part. Throws
  /// Error(invalid_argument) if the rank is not in the list.
  [[nodiscard]] const std::optional<Config>& by_rank(int rank) const {
    return configs[detail::position_of(rank, ranks, configs.size())];
  }
  /// Returns (rank, config) for each rank with a config, in the order of the list. The references are valid as long as
  /// this part.
  [[nodiscard]] std::vector<std::pair<int, const Config&>> present() const {
    std::vector<std::pair<int, const Config&>> values;
    for (std::size_t i = 0; i < configs.size(); ++i)
      if (configs[i]) values.emplace_back(ranks[i], *configs[i]);
    return values;
  }
};

/// Returns the next layer of this rank, or nullopt after the last layer. A null config means that the rank has nothing
/// in this layer.
using LayerSource = std::function<std::optional<Config>()>;
/// Receives a part on the root. Memory that the consumer does not copy or move out of the part returns to the senders
/// when the call returns.
using LayerConsumer = std::function<void(LayerPart& part)>;

/// Options of gather_each().
struct StreamOptions {
  /// As in GatherOptions. `memory_budget` then limits the size of the files of each sender. Tensors that a consumer
  /// keeps do not block a sender, because the root copies each part before it is consumed.
  struct Workspace {
    /// The directory, as GatherOptions::Workspace::path.
    std::string path = {};
    /// Compression level of the files. Unset: no compression.
    std::optional<int> zstd_level = {};
  };

  /// The limit, in bytes, of the memory for parts that are in flight or being consumed. The senders get equal shares of
  /// it. It covers the shared memory of the senders and the memory in which the root receives from other hosts. The
  /// same on all members.
  std::uint64_t memory_budget = 256_MiB;
  /// The number of parts that a sender may have in flight. With 1 it prepares nothing in advance. The same on all
  /// members.
  int pipeline_depth = 2;
  Route route = Route::auto_;  ///< the same on all members
  /// Longest wait without progress; unset: the default of the group.
  std::optional<std::chrono::milliseconds> timeout = {};
  std::stop_token stop = {};  ///< a stop request cancels this rank, and so aborts the group
  /// Options of the transfer through files.
  Workspace workspace = {};
  /// Checks for programs under development.
  GatherOptions::Debug debug = {};
};

/// Measurements of a stream on this rank.
struct StreamReport {
  /// The route that transferred the tensors.
  Route route = Route::auto_;
  std::string reason;             ///< why this route was chosen
  std::uint64_t layers = 0;       ///< layers that the source of this rank returned
  std::uint64_t parts = 0;        ///< parts sent; on the root: parts consumed
  std::uint64_t bytes = 0;        ///< tensor bytes sent; on the root: tensor bytes received from all ranks
  std::uint64_t arena_bytes = 0;  ///< the part of `bytes` that was already in shared memory and did not move
  std::uint64_t rounds = 0;       ///< all-gather rounds: 2, and 2 more to set up the first stream of the group
  std::uint64_t part_bytes = 0;   ///< the most tensor bytes of one rank in a part
  double seconds = 0;             ///< duration of the whole call
  double seconds_waiting = 0;     ///< time spent waiting for the root to return a part; on the root: for parts
  /// The most memory for parts that this rank held at any moment, including page-locked memory.
  std::uint64_t peak_slot_bytes = 0;
};

/// Streams the layers of all members of a list to the root, ranks[0]. Collective over the group: each rank makes one
/// call.
///
/// `ranks` is a list as in get_configs_parallel(): the same on all its members, and disjoint from other lists. A rank
/// that is in no list takes part only in the opening and the closing round. Its source and consumer are not called and
/// may be empty. Every member has a source. All sources of a list return the same number of layers.
///
/// `consume` is called on the root only, with the configs of all members, layer by layer and part by part. The root's
/// own tensors are views of its own memory, cut like those of the other members. On other ranks `consume` may be empty.
/// Sources and consumers run on the calling thread. They must not use this group, except for local calls such as
/// progress() and rank(). They may use another group, such as a duplicate().
///
/// Flow control: a sender prepares up to pipeline_depth parts and then waits until the root has returned the oldest. A
/// Tensor that the consumer keeps also keeps the memory of its part. The sender then stops pipeline_depth parts later,
/// until the consumer destroys that Tensor, on any thread. Parts without bytes in shared memory (no tensors, or no
/// configs) are not counted; the message buffer of about 256 KiB limits them. Parts from other hosts are always
/// counted.
///
/// Tensors: a sender may reuse the memory of its tensors when its source is called for the next layer. Tensors in a
/// SharedArena are reusable when their leases end. On the root's host they are leased without a copy and are never cut.
/// A strided tensor whose rows do not fit into a part takes one part of additional ordinary memory. Tensors on GPUs
/// (muster/cuda.hpp) are copied to the host part by part, after the work that is queued on the stream of this thread.
/// One part of additional page-locked memory, which the budget does not include, is needed on the root, on senders of
/// other hosts, and for a layer with both host and GPU tensors. Parts of other hosts are received while the consumer
/// runs if any thread may call MPI (MPI_THREAD_MULTIPLE). Otherwise they are received between its calls and inside
/// group.progress().
///
/// Memory: if the budgets of all lists together exceed the available memory, they are reduced to fit. The memory is
/// kept for the next stream of this group; trim() releases it. Tensors that a consumer keeps after a stream do not
/// count against the budget of the next stream.
///
/// Deadlines count from the last progress of the awaited rank. The start and the end of each call of a source or a
/// consumer are progress. A call that takes longer than the deadline must call group.progress() in between.
///
/// Errors are thrown on all ranks alike, as by the other gathers. Error(invalid_argument | rank_mismatch | out_of_space
/// | unsupported) about lists, options or sources of different lengths leaves the group usable; for the lengths, the
/// message gives the count of each rank. An exception of a source or a consumer also leaves the group usable. Every
/// rank then throws an Error with the rank, host and message of its origin. Its kind is that of the Error, or `io` for
/// any other exception. Error(timeout | peer_lost | cancelled) of the stream itself aborts the group. So does a rank
/// that cannot set up the first stream of a group (no file descriptors, no memory).
StreamReport gather_each(const LayerSource& source, const RankList& ranks, Group& group, const LayerConsumer& consume,
                         const StreamOptions& options = {});

}  // namespace muster
