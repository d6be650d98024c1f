// SPDX-License-Identifier: Apache-2.0
#pragma once
// The exchange: one gather of any kind, over any route. The root is the first rank of a list.
//
//  1. Prepare, locally: check the arguments, and let the route determine its needs. A failure here becomes this rank's
//     status.
//  2. Round 1: all ranks of the group contribute their records. Every rank receives the same conclusions from them
//     (record.hpp, agreement.hpp). If a rank has failed or the ranks disagree, further rounds exchange the error texts,
//     and all ranks throw the same error. The group remains usable. If a route must check something first (route.hpp:
//     Preflight), one more round reports whether the check succeeded on all ranks.
//  3. Move: the route transfers bytes from the senders to the root of each list. A failure becomes the status of round
//     2.
//  4. Round 2, if bytes of any list moved after round 1: as round 1. After it the result is valid. Without round 2, a
//     later error of a rank fails the group, because the other ranks have returned by then.
//  5. The root inserts its own value into the entries. For a merge, the merged tensor is the first entry.
//
// A failed wait (deadline, lost peer, cancellation) poisons the group and ends the exchange at once. A rank that runs
// out of memory between these steps does the same, because it cannot report the failure in a round.

#include <memory>
#include <optional>
#include <vector>

#include "muster/merge_gather.hpp"
#include "src/gather/route.hpp"

namespace muster {
namespace detail {

/// State that outlives an exchange on a rank: its report, and its memory that the root holds.
class ExchangeState {
 public:
  ExchangeReport report;
  std::vector<std::unique_ptr<gather::OutstandingLease>> obligations;
};

}  // namespace detail

namespace gather {

struct Outcome {
  std::vector<int> list;
  std::vector<std::optional<Config>> entries;  // on the root, by position
  std::shared_ptr<detail::ExchangeState> state;
};

/// Collective, inside collectively() (opening.hpp). `value` may be null on ranks that have no value. `merge` is for
/// GatherKind::merge. `refusal`: the reason why this rank cannot take part from the start, or null.
Outcome exchange(GatherKind operation, const Config* value, std::span<const int> ranks, Group& group,
                 const GatherOptions& options, const Merge* merge = nullptr, const Error* refusal = nullptr);

/// As the public calls, except that the root's own tensor in the result keeps its owner.
GatheredTensors get_tensors(const Tensor& tensor, const RankList& ranks, Group& group, const GatherOptions& options);
MergeResult merge_tensor(const Tensor& tensor, const Merge& merge, const RankList& ranks, Group& group,
                         const GatherOptions& options);

/// Takes part in such an exchange as a rank that cannot complete it: all ranks throw `failure` in its name. For
/// arguments that are invalid before they reach the library. Collective.
[[noreturn]] void refuse(GatherKind operation, const Error& failure, const RankList& ranks, Group& group,
                         const GatherOptions& options);

/// Does the same in the order of the asynchronous calls of the group. The error is delivered to the other ranks by
/// their Work. Collective.
void refuse_async(GatherKind operation, const Error& failure, Group& group);

/// Frees memory that ended asynchronous calls of the group keep for later ones. Does nothing while such a call runs.
/// Returns the bytes.
std::uint64_t trim_async(Group& group);

}  // namespace gather
}  // namespace muster
