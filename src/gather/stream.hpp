// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stream: layer after layer by one collective call, with credits instead of barriers.
//
//  1. Opening round, on the group: as round 1 of an exchange (arguments, lists, versions, route), and what decides the
//     size of a part: budget, depth, available memory (needs.hpp).
//  2. The first stream of a group makes a companion group. All that follows up to 6 is on the companion, between a
//     sender and its first rank; it is kept for the next stream, and dropped on all ranks when a stream fails.
//  3. A sender, for each part: waits until part i - depth has been given back; asks its source where a layer begins;
//     brings what is on devices to the host, into the part's slot where it has one (HostStaging);
//     sends a header (PartHeader, slices); lets the route move the part; says that it is whole. If the route has a
//     PartSender (route.hpp), it sends header and part, and the first rank's PartReceiver takes them.
//  4. The first rank, for each part: asks its own source where a layer begins; takes the headers of all senders that
//     still have parts of the layer; lets the route take the parts in; waits until they are whole; consumes. The end
//     of the consumer's call gives the parts back, but for what it keeps.
//  5. A header without parts is a sender's end. The stream ends when all have ended at the same layer. PartSender and
//     PartReceiver settle: nothing of the stream is under way any more.
//  6. A rank whose source, consumer or own work fails poisons the companion, which ends the waits of all others at
//     once, and goes on to 7. What ends a wait by itself (deadline, death, cancellation) poisons the group as well.
//  7. Closing round, on the group: as round 2 of an exchange. All ranks throw the words of the lowest that failed;
//     before that, what is still under way is settled.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/gather_each.hpp"
#include "src/gather/route.hpp"
#include "src/trace/span.hpp"

namespace muster::gather {

/// One stream on one rank of a list. Everything outlives the stream.
struct StreamCall {
  const LayerSource* source = nullptr;
  const LayerConsumer* consume = nullptr;
  Call entry;  // list, position and the group of the call
  sync::Group* companion = nullptr;
  std::vector<std::shared_ptr<const sync::PeerLiveness>> others;  // all other ranks of the group
  const RouteDriver* driver = nullptr;
  PartSender* part_sender = nullptr;      // of a sender whose route has one
  PartReceiver* part_receiver = nullptr;  // of the first rank, likewise
  GatherOptions part_options;             // of each part's transfer
  std::uint64_t part_bytes = 0;
  StreamReport* report = nullptr;
  trace::Span* span = nullptr;
  mutable std::chrono::steady_clock::time_point looked{};  // for dead ranks, if nothing had to be waited for

  [[nodiscard]] WaitOptions wait(const char* phase) const {
    return {.timeout = part_options.timeout, .stop = part_options.stop, .phase = phase};
  }
  /// The call of one part's transfer; `value` is null on the first rank.
  [[nodiscard]] Call part_call(std::uint64_t layer, std::uint32_t part, const Config* value) const;
  /// Runs a source or a consumer: progress at its begin and end, and what it throws is a CallbackFailure with `what`
  /// before its words.
  void call_back(const std::string& what, const std::function<void()>& run) const;
  /// The next layer of this rank's source. Throws CallbackFailure.
  std::optional<Config> next_layer(std::uint64_t layer) const;
  /// The part with its tensors brought to the host; none if they are there.
  [[nodiscard]] std::optional<Config> staged(const Config& part) const;
  /// What brings the part's tensors from devices into the slot that it travels in; null if they are on the host, or
  /// do not travel in one, or not all alike.
  [[nodiscard]] std::unique_ptr<SlotFiller> filler_of(const Call& call) const;
  /// Memory of the host that staging takes.
  [[nodiscard]] std::uint64_t staged_bytes() const;
  /// Throws if the stream has failed, is cancelled, or a rank is dead, although nothing had to be waited for.
  void check() const;
};

/// What a source or a consumer threw: this rank's own failure, whatever has become of the group.
struct CallbackFailure {
  Error error;
};

/// Before each part. If a sender's stream ends, `parts` is 0.
struct PartHeader {
  std::uint64_t layer = 0;
  std::uint32_t part = 0;
  std::uint32_t parts = 0;
  Record record;
};

/// A sender's side.
class StreamSending {
 public:
  explicit StreamSending(const StreamCall& call) : call_(call) {}
  void run();
  /// The stream has failed, and the first rank takes nothing any more: what it has not taken is this rank's again.
  void withdraw() noexcept;

 private:
  void send_layer(std::uint64_t layer, const Config& config);
  void send_part(std::uint64_t layer, std::uint32_t part, std::uint32_t parts, const Config* value,
                 const std::vector<TensorSlice>& slices);
  void send_by_part_sender(PartHeader header, const std::vector<TensorSlice>& slices, const Config* value);
  void send_header(const PartHeader& header, const std::vector<TensorSlice>& slices);
  void wait_for_credit();

  const StreamCall& call_;
  std::deque<std::vector<std::unique_ptr<Obligation>>> under_way_;  // parts that the first rank may hold
  // Of the part that is being sent. After a failure it stays until all ranks know of that: the first rank may be taking
  // it in.
  Call part_call_;
  std::unique_ptr<Transfer> transfer_;
};

/// The first rank's side.
class StreamReceiving {
 public:
  explicit StreamReceiving(const StreamCall& call);
  void run();

 private:
  struct Arrival {
    PartHeader header;
    std::vector<TensorSlice> slices;
  };
  Arrival take_header(std::size_t position, std::uint64_t layer, std::uint32_t part);
  void take_layer(std::uint64_t layer, std::optional<Config> own);
  void take_bytes(LayerPart& part);
  void take_from_part_receiver(LayerPart& part);
  [[nodiscard]] bool is_from_part_receiver(std::size_t position) const;
  void check_ends(std::uint64_t layer, bool own_end) const;
  std::vector<std::byte> receive(int sender, std::uint64_t most);
  void consume(LayerPart& part);

  const StreamCall& call_;
  std::vector<Arrival> arrivals_;  // by position; the newest of each sender
};

/// Gives free memory of a group's streams back; returns the bytes.
std::uint64_t trim_streams(SyncGroup& group);

}  // namespace muster::gather
