// SPDX-License-Identifier: Apache-2.0
#pragma once
// The exchange: one gather, whatever it gathers and however it travels.
//
//  1. Prepare, locally: check the arguments, let the route see what it needs. A failure here becomes this rank's
//     status.
//  2. Round 1: all ranks of the group give their records. Every rank draws the same conclusions from them (record.hpp).
//     If one has failed or they disagree, a further round carries everyone's words, and all throw the same error; the
//     group stays usable. If a route has something to check first (route.hpp: Preflight), a round follows that says
//     whether all ranks are well.
//  3. Move: the route carries bytes from the senders to the first rank of each list. A failure becomes the status of
//     round 2.
//  4. Round 2, if bytes of any list moved after round 1: as round 1. From here on the result counts. Without it, what
//     a rank still fails with is the failure of the group: the others have returned by then.
//  5. The first rank puts its own value among the entries (of a merge: what came of all values is the first entry).
//
// A wait that fails (deadline, lost peer, cancellation) poisons the group and ends the exchange at once. So does a rank
// that is out of memory where it can tell nobody else: between those steps.

#include <memory>
#include <optional>
#include <vector>

#include "muster/merge_gather.hpp"
#include "src/gather/route.hpp"

namespace muster {
namespace detail {

/// What outlives an exchange on a rank: its figures, and what the first rank holds of it.
class ExchangeState {
 public:
  ExchangeReport report;
  std::vector<std::unique_ptr<gather::Obligation>> obligations;
};

}  // namespace detail

namespace gather {

struct Outcome {
  std::vector<int> list;
  std::vector<std::optional<Config>> entries;  // on the first rank, by position
  std::shared_ptr<detail::ExchangeState> state;
};

/// Collective, inside collectively() (opening.hpp). `value` may be null on ranks that have none; `merge` belongs to
/// Operation::merge; `refusal` is what this rank cannot go on for, if it cannot from the start.
Outcome exchange(Operation operation, const Config* value, std::span<const int> ranks, SyncGroup& group,
                 const GatherOptions& options, const Merge* merge = nullptr, const Error* refusal = nullptr);

/// The public calls, but that the first rank's own tensor in the result keeps its owner.
GatheredTensors get_tensors(const Tensor& tensor, const RankList& ranks, SyncGroup& group,
                            const GatherOptions& options);
Merged merge_tensor(const Tensor& tensor, const Merge& merge, const RankList& ranks, SyncGroup& group,
                    const GatherOptions& options);

/// Takes part in such an exchange as a rank that cannot: all ranks throw `failure` in its name. For arguments that are
/// none before the library has seen them. Collective.
[[noreturn]] void refuse(Operation operation, const Error& failure, const RankList& ranks, SyncGroup& group,
                         const GatherOptions& options);

/// Gives back what the group's asynchronous calls that have ended keep for the next ones; nothing while one runs.
/// Returns the bytes.
std::uint64_t trim_async(SyncGroup& group);

}  // namespace gather
}  // namespace muster
