// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stream: one collective call that transfers layer after layer, with credits instead of barriers. The root is the
// first rank of a list.
//
//  1. Opening round, on the group: as round 1 of an exchange (arguments, lists, versions, route). The records also
//     contain what determines the size of a part: budget, depth, available memory (policy.hpp).
//  2. The first stream of a group creates a companion group. Steps 3 to 6 use the companion, between a sender and its
//     root. It is kept for the next stream, and dropped on all ranks if a stream fails.
//  3. A sender does the following for each part i. It waits until part i - depth has been returned. At the beginning of
//     a layer it calls its source. It copies tensors on devices to the host, into the part's slot if it has one
//     (HostStaging). It sends a header (PartHeader, slices), lets the route move the part, and reports that the part is
//     complete. If the route has a PartSender (route.hpp), it sends header and part, and the root's PartReceiver
//     receives them.
//  4. The root does the following for each part. At the beginning of a layer it calls its own source. It receives the
//     headers of all senders that still have parts of the layer. It lets the route receive the parts, waits until they
//     are complete, and calls the consumer. When the consumer returns, the parts are returned, except for tensors that
//     the consumer keeps.
//  5. A header without parts ends a sender's stream. The stream ends when all senders have ended at the same layer.
//     PartSender and PartReceiver settle, so that nothing of the stream is in flight any more.
//  6. A rank whose source, consumer or own work fails poisons the companion. This ends the waits of all other ranks at
//     once. The rank continues with step 7. Failures of a wait itself (deadline, death, cancellation) also fail the
//     group.
//  7. Closing round, on the group: as round 2 of an exchange. All ranks throw the error of the lowest failed rank.
//     Before that, transfers in flight are settled.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/gather_each.hpp"
#include "src/gather/route.hpp"
#include "src/trace/span.hpp"

namespace muster::gather {

/// One stream on one rank of a list. Everything that it points to outlives the stream.
struct StreamCall {
  const LayerSource* source = nullptr;
  const LayerConsumer* consume = nullptr;
  GatherCall entry;  // list, position and the group of the call
  group::BaseGroup* companion = nullptr;
  std::vector<std::shared_ptr<const group::PeerLiveness>> others;  // all other ranks of the group
  const RouteDriver* driver = nullptr;
  PartSender* part_sender = nullptr;      // on a sender whose route has a PartSender
  PartReceiver* part_receiver = nullptr;  // on the root of such a route
  GatherOptions part_options;             // for each part's transfer
  std::uint64_t part_bytes = 0;
  StreamReport* report = nullptr;
  trace::Span* span = nullptr;
  mutable std::chrono::steady_clock::time_point looked{};  // last check for dead ranks without a wait

  [[nodiscard]] WaitOptions wait(const char* phase) const {
    return {.timeout = part_options.timeout, .stop = part_options.stop, .phase = phase};
  }
  /// Returns the call of one part's transfer; `value` is null on the root.
  [[nodiscard]] GatherCall part_call(std::uint64_t layer, std::uint32_t part, const Config* value) const;
  /// Runs a source or a consumer. Reports progress before and after it. An exception becomes a CallbackFailure with
  /// `what` in front of its message.
  void call_back(const std::string& what, const std::function<void()>& run) const;
  /// Returns the next layer of this rank's source. Throws CallbackFailure.
  std::optional<Config> next_layer(std::uint64_t layer) const;
  /// Returns the part with its tensors copied to the host; nullopt if they are on the host already.
  [[nodiscard]] std::optional<Config> staged(const Config& part) const;
  /// Returns the filler that copies the part's tensors from devices into the part's slot. Null if the tensors are on
  /// the host, do not use a slot, or are of different kinds.
  [[nodiscard]] std::unique_ptr<SlotFiller> filler_of(const GatherCall& call) const;
  /// Returns how much host memory staging uses.
  [[nodiscard]] std::uint64_t staged_bytes() const;
  /// Throws if the stream has failed, is cancelled, or a rank is dead. For steps that did not have to wait.
  void check() const;
};

/// An exception of a source or a consumer. It is this rank's own failure, whatever the state of the group is.
struct CallbackFailure {
  Error error;
};

/// Precedes each part. At the end of a sender's stream `parts` is 0.
struct PartHeader {
  std::uint64_t layer = 0;
  std::uint32_t part = 0;
  std::uint32_t parts = 0;
  ExchangeRecord record;
};

struct ReceivedPart {
  PartHeader header;
  std::vector<TensorSlice> slices;
};
/// Reads the message that precedes a part, sent by the rank with this global number. `parts`: the number of parts of
/// the layer, which part 0 has told. Throws Error(corrupt) if it is not the message of this part.
ReceivedPart received_part(std::span<const std::byte> message, int rank, std::uint64_t layer, std::uint32_t part,
                           std::uint32_t parts);

/// A sender's side.
class StreamSending {
 public:
  explicit StreamSending(const StreamCall& call) : call_(call) {}
  void run();
  /// Called when the stream has failed and the root receives nothing more: takes back the memory that the root has not
  /// taken.
  void withdraw() noexcept;

 private:
  void send_layer(std::uint64_t layer, const Config& config);
  void send_part(std::uint64_t layer, std::uint32_t part, std::uint32_t parts, const Config* value,
                 const std::vector<TensorSlice>& slices);
  void send_by_part_sender(PartHeader header, const std::vector<TensorSlice>& slices, const Config* value);
  void send_header(const PartHeader& header, const std::vector<TensorSlice>& slices);
  void wait_for_credit();

  const StreamCall& call_;
  std::deque<std::vector<std::unique_ptr<OutstandingLease>>> under_way_;  // parts that the root may hold
  // The part that is being sent. After a failure it is kept until all ranks know of the failure, because the root may
  // be receiving it.
  GatherCall part_call_;
  std::unique_ptr<Transfer> transfer_;
};

/// The root's side.
class StreamReceiving {
 public:
  explicit StreamReceiving(const StreamCall& call);
  void run();

 private:
  ReceivedPart take_header(std::size_t position, std::uint64_t layer, std::uint32_t part);
  void take_layer(std::uint64_t layer, std::optional<Config> own);
  void take_bytes(LayerPart& part);
  void take_from_part_receiver(LayerPart& part);
  [[nodiscard]] bool is_from_part_receiver(std::size_t position) const;
  void check_ends(std::uint64_t layer, bool own_end) const;
  std::vector<std::byte> receive(int sender, std::uint64_t most);
  void consume(LayerPart& part);

  const StreamCall& call_;
  std::vector<ReceivedPart> arrivals_;  // by position; the latest of each sender
};

/// Frees unused memory of a group's streams; returns the bytes.
std::uint64_t trim_streams(Group& group);

}  // namespace muster::gather
