// SPDX-License-Identifier: Apache-2.0
// Merging across hosts. Ranks of other hosts send their tensors to the root over the transport. Ranks of the root's
// host write their tensors into windows of shared memory.
//
//  1. offer: every rank checks that its tensor can be merged. The root announces the memory that it has and may take.
//     All ranks see from the records whether the merged tensor and the window fit (policy.hpp).
//  2. All ranks compute the same layout from the records. The root allocates memory, and the tensors of other hosts
//     become parts in the sense of stream_protocol.hpp. When all of those have been announced, the root sends each
//     sender of its own host the place of a ring of windows. If the merge cannot be done it sends 0 instead, and round
//     2 gives the reason. Windows avoid MPI on one host, where MPI may end this process if a peer is killed.
//  3. A tensor whose bytes are contiguous in the merged one (concat along the first dimension, stack) is received at
//     its final place. Any other tensor passes through the window, which has two pieces per sender. The rows of one
//     piece are copied to their places while the next piece is in flight.
//  4. For max and sum the window holds one piece of every sender. When all of them have arrived they are reduced into
//     the merged tensor, in the order of the rank list. So the result is bit-identical to that of the other routes.
//  5. Meanwhile the root copies its own tensor.
// So the root holds the merged tensor and the window, but never the tensors of the senders.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

#include "src/gather/merge_record.hpp"
#include "src/gather/opening.hpp"
#include "src/gather/policy.hpp"
#include "src/gather/shm_route.hpp"
#include "src/group/error_propagation.hpp"
#include "src/merge/layout.hpp"
#include "src/merge/reduce.hpp"
#include "src/multihost/stream_protocol.hpp"
#include "src/shm/stream_copy.hpp"
#include "src/shm/window_ring.hpp"

namespace muster::multihost {
namespace {

using gather::ExchangeRecord;

// The bytes of its own tensor that the root copies before it advances the transport again.
constexpr std::uint64_t own_piece = 1 << 20;
constexpr std::uint64_t most_open = 2;  // pieces of the window per sender
constexpr std::uint32_t ring_depth = 2;
constexpr const char* receiving = "merge: receiving";

/// One ring as seen by either side. The group keeps it, so that memory is allocated and handed over once.
struct MergeRing {
  std::shared_ptr<shm::WindowRing> windows;
  std::uint32_t turn = 0;  // index of the next window

  [[nodiscard]] std::uint64_t bytes() const noexcept { return windows ? ring_depth * windows->window_bytes() : 0; }
};

struct MergeRings {
  std::map<int, MergeRing> own;     // by sender
  std::map<int, MergeRing> theirs;  // by root
};

std::shared_ptr<MergeRings> merge_rings_of(Group& group) {
  return group::inside(group).extension<MergeRings>();
}

/// The plan of a merge, which all ranks of the list compute from the records.
struct Plan {
  merge::Layout layout;
  merge::Rows rows;
  std::vector<std::uint64_t> bytes;  // of each source
  std::uint64_t window_piece = 0;
  std::vector<bool> is_near;  // the source writes into a ring of the root

  Plan(const gather::GatherCall& call, const HostsGroup& group, const gather::Records& records)
      : layout(gather::merge_layout(*call.merge, spec_of(call), call.list, records)), rows(merge::rows_of(layout)) {
    std::uint64_t largest = 0;
    for (const int rank : call.list) {
      bytes.push_back(records[static_cast<std::size_t>(rank)].moving_bytes);
      largest = std::max(largest, bytes.back());
      is_near.push_back(!goes_between_hosts(call, group, rank));
    }
    window_piece = gather::merge_piece_bytes(call.list.size() - 1, largest);
  }
  static TensorSpec spec_of(const gather::GatherCall& call) {
    const TensorView& own = call.value->as_tensor().view();
    return {own.dtype(), own.shape()};
  }
  [[nodiscard]] bool reduces() const { return layout.combine != merge::Combine::copy; }
  /// Returns the offset of a source in the merged tensor, if its bytes are contiguous there.
  [[nodiscard]] std::optional<std::uint64_t> straight(std::size_t source) const {
    if (reduces() || is_near[source]) return std::nullopt;
    const auto parts = merge::rectangles_of(rows, static_cast<int>(source), 0, bytes[source]);
    if (parts.size() != 1 || parts.front().rows != 1) return std::nullopt;
    return parts.front().to;
  }
  [[nodiscard]] std::uint64_t piece_bytes(std::size_t source) const {
    return straight(source) ? cut_piece : window_piece;
  }
  [[nodiscard]] std::size_t pieces(std::size_t source) const {
    return bytes[source] == 0 ? 0 : (bytes[source] + piece_bytes(source) - 1) / piece_bytes(source);
  }
  /// Returns the number of bytes of a piece.
  [[nodiscard]] std::uint64_t bytes_of(std::size_t source, std::size_t piece) const {
    return std::min(piece_bytes(source), bytes[source] - piece * piece_bytes(source));
  }
};

/// Steps 2 to 5 on the root.
class Merging {
 public:
  Merging(const gather::GatherCall& call, HostsGroup& group, Plan plan)
      : call_(call), group_(group), plan_(std::move(plan)), own_(call.value->as_tensor().view()) {}

  Tensor run();

 private:
  /// A source other than the root.
  struct SourceProgress {
    std::size_t source = 0;
    std::optional<std::uint64_t> straight = {};
    std::byte* slots = nullptr;  // of the window
    MergeRing* ring = nullptr;   // if the source is on the root's host
    std::size_t whole = 0;       // the number of pieces that have arrived
  };
  void take_memory();
  Receiver::IncomingPart part_of(SourceProgress& lane);
  void copy_all(Receiver& receiver);
  void reduce_all(Receiver& receiver);
  /// Waits for the next piece of a source on the root's host.
  void take_near(SourceProgress& lane);
  [[nodiscard]] const std::byte* at(const SourceProgress& lane, std::size_t piece) const {
    if (lane.ring != nullptr) return lane.ring->windows->window(lane.ring->turn).data();
    return lane.slots + piece % most_open * plan_.window_piece;
  }
  static void release(MergeRing& ring) { ring.windows->release(ring.turn++); }
  void copy_rows(std::size_t source, std::uint64_t begin, std::uint64_t end, const std::byte* from);

  const gather::GatherCall& call_;
  HostsGroup& group_;
  Plan plan_;
  const TensorView& own_;
  WaitOptions wait_ = call_.wait(receiving);
  std::shared_ptr<std::byte> target_;
  std::shared_ptr<std::byte> window_;
  std::vector<std::byte> staging_;  // for strided elements of the root's own tensor
  std::vector<SourceProgress> far_;
  std::vector<SourceProgress> near_;
  // Read by any thread that advances the transport.
  std::atomic<std::size_t> reduced_ = 0;  // the number of pieces
  std::atomic<bool> is_merged_ = true;    // if false, the data that still arrives is dropped
};

Tensor Merging::run() {
  std::vector<Receiver::SenderLimit> sources;
  for (std::size_t source = 1; source < call_.list.size(); ++source) {
    if (plan_.bytes[source] == 0) continue;
    (plan_.is_near[source] ? near_ : far_).push_back({source});
    if (!plan_.is_near[source]) sources.push_back({call_.list[source], plan_.bytes[source]});
  }
  const std::optional<Error> failure = gather::attempt(group_, [&] { take_memory(); });
  Receiver receiver(call_, group_, sources, [&](std::size_t lane) {
    if (failure) throw Error(*failure);
    return part_of(far_[lane]);
  });
  is_merged_ = receiver.take_heads(wait_) && !failure;
  for (const SourceProgress& lane : near_)
    gather::tell(call_, call_.list[lane.source], is_merged_ ? lane.ring->windows->place() : 0, receiving);
  if (is_merged_)
    group::or_fail(group_, [&] {
      if (plan_.reduces())
        reduce_all(receiver);
      else
        copy_all(receiver);
    });
  receiver.take_all(wait_);
  shm::publish_fence();
  if (failure) throw Error(*failure);
  return {TensorView(plan_.layout.target.dtype, std::move(plan_.layout.target.shape), target_.get()), target_};
}

void Merging::take_memory() {
  const std::uint64_t target = byte_size(plan_.layout.target.dtype, plan_.layout.target.shape);
  std::uint64_t slots = 0;
  for (SourceProgress& lane : far_) {
    lane.straight = plan_.straight(lane.source);
    if (!lane.straight) slots += most_open;
  }
  const std::shared_ptr<BufferPool> pool = buffer_pool_of(group_);
  target_ = pool->take(target, call_.options->pool_limit);
  window_ = pool->take(slots * plan_.window_piece, call_.options->pool_limit);
  std::byte* next = window_.get();
  for (SourceProgress& lane : far_) {
    if (lane.straight) continue;
    lane.slots = next;
    next += most_open * plan_.window_piece;
  }
  for (SourceProgress& lane : near_) {
    lane.ring = &merge_rings_of(group_)->own[call_.list[lane.source]];
    if (lane.ring->windows && lane.ring->windows->window_bytes() >= plan_.window_piece) continue;
    *lane.ring = {};
    *lane.ring = {std::make_shared<shm::WindowRing>(ring_depth, plan_.window_piece, 1)};
  }
  if (plan_.rows.has_gaps && target != 0) std::memset(target_.get(), 0, target);
  if (!own_.is_contiguous()) staging_.resize(std::min(own_.nbytes(), plan_.reduces() ? plan_.window_piece : own_piece));
}

Receiver::IncomingPart Merging::part_of(SourceProgress& lane) {
  Receiver::IncomingPart part;
  part.pieces = plan_.pieces(lane.source);
  part.keeper = lane.straight ? target_ : window_;
  part.place = [this, &lane](std::size_t piece) -> std::span<std::byte> {
    const std::uint64_t bytes = plan_.bytes_of(lane.source, piece);
    if (lane.straight) return {target_.get() + *lane.straight + piece * cut_piece, bytes};
    const std::size_t used = plan_.reduces() && is_merged_ ? reduced_.load() : lane.whole;
    if (piece >= used + most_open) return {};
    return {lane.slots + piece % most_open * plan_.window_piece, bytes};
  };
  part.arrived = [this, &lane](std::size_t piece) {
    lane.whole = piece + 1;
    if (lane.straight || plan_.reduces()) return;
    const std::uint64_t begin = piece * plan_.window_piece;
    copy_rows(lane.source, begin, begin + plan_.bytes_of(lane.source, piece), at(lane, piece));
  };
  return part;
}

void Merging::take_near(SourceProgress& lane) {
  const int sender = call_.list[lane.source];
  lane.ring->windows->wait_full(lane.ring->turn, 1, std::span(&sender, 1), group_, wait_);
  group_.progress();
}

void Merging::copy_all(Receiver& receiver) {
  for (std::uint64_t begin = 0; begin < own_.nbytes(); begin += own_piece) {
    const std::uint64_t end = std::min(begin + own_piece, own_.nbytes());
    copy_rows(0, begin, end, merge::gapless(own_, begin, end, staging_.data()));
    receiver.look();
  }
  bool has_more = !near_.empty();
  for (std::size_t piece = 0; has_more; ++piece) {
    has_more = false;
    for (SourceProgress& lane : near_) {
      if (piece >= plan_.pieces(lane.source)) continue;
      has_more = true;
      take_near(lane);
      const std::uint64_t begin = piece * plan_.window_piece;
      copy_rows(lane.source, begin, begin + plan_.bytes_of(lane.source, piece), at(lane, piece));
      release(*lane.ring);
      receiver.look();
    }
  }
}

void Merging::reduce_all(Receiver& receiver) {
  for (std::size_t piece = 0; piece < plan_.pieces(0); ++piece) {
    receiver.take_pieces(piece + 1, wait_);
    std::vector<const std::byte*> parts(call_.list.size());
    const std::uint64_t begin = piece * plan_.window_piece;
    const std::uint64_t bytes = plan_.bytes_of(0, piece);
    parts[0] = merge::gapless(own_, begin, begin + bytes, staging_.data());
    for (SourceProgress& lane : near_) take_near(lane);
    for (const std::vector<SourceProgress>* lanes : {&far_, &near_})
      for (const SourceProgress& lane : *lanes) parts[lane.source] = at(lane, piece);
    merge::reduce(plan_.layout.combine, own_.dtype(), {target_.get() + begin, bytes}, parts);
    for (SourceProgress& lane : near_) release(*lane.ring);
    ++reduced_;
  }
}

/// Copies bytes [begin, end) of a source from `from` to their places in the merged tensor.
void Merging::copy_rows(std::size_t source, std::uint64_t begin, std::uint64_t end, const std::byte* from) {
  for (const merge::Rectangle& part : merge::rectangles_of(plan_.rows, static_cast<int>(source), begin, end))
    shm::stream_rows(target_.get() + part.to, part.to_stride, from + part.from, part.from_stride, part.bytes,
                     part.rows);
}

class HostsMerge final : public gather::Transfer {
 public:
  HostsMerge(const gather::GatherCall& call, HostsGroup& group)
      : call_(call), group_(group), own_(call.value->as_tensor().view()) {}

  void offer(ExchangeRecord& record) override {
    if (call_.is_first()) offer_to_receive(call_, *buffer_pool_of(group_), record);
    gather::offer_merge(*call_.merge, own_, record);
    record.moving_bytes = own_.nbytes();
  }

  void move(const gather::Records& records, ExchangeReport& report) override {
    Plan plan(call_, group_, records);
    for (std::size_t source = 1; source < plan.bytes.size(); ++source)
      if (!plan.is_near[source] && (call_.is_first() || source == call_.position))
        report.network_bytes += plan.bytes[source];
    if (call_.is_first()) {
      result_ = Merging(call_, group_, std::move(plan)).run();
      return;
    }
    if (own_.nbytes() == 0) return;
    if (plan.is_near[call_.position]) return write(plan.window_piece);
    Sender sender(call_, group_);
    ExchangeRecord same;
    sender.offer(call_.value, same);
    sender.send_only(call_.wait("merge: sending"), plan.piece_bytes(call_.position));
  }

  std::vector<std::optional<Config>> deliver() override { return {Config(std::move(result_))}; }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override {
    return buffer_pool_of(group_)->bytes() + merge_ring_bytes(group_);
  }

 private:
  /// Runs on ranks of the root's host.
  void write(std::uint64_t piece_bytes) {
    const WaitOptions wait = call_.wait("merge: sending");
    const std::uint64_t place = gather::hear(call_, call_.first(), wait.phase);
    if (place == 0) return;
    group::or_fail(group_, [&] {
      MergeRing& ring = merge_rings_of(group_)->theirs[call_.first()];
      if (!ring.windows || ring.windows->place() != place)
        ring = {std::make_shared<shm::WindowRing>(*group_.region_of(call_.first()), place)};
      if (ring.windows->window_bytes() < piece_bytes)
        throw Error(ErrorKind::corrupt, "malformed message: the root of a merge grants buffers that are too small");
      for (std::uint64_t begin = 0; begin < own_.nbytes(); begin += piece_bytes, ++ring.turn) {
        const std::uint64_t end = std::min(begin + piece_bytes, own_.nbytes());
        ring.windows->claim(ring.turn, call_.first(), group_, wait);
        std::byte* window = ring.windows->window(ring.turn).data();
        if (own_.is_contiguous())
          shm::stream_copy(window, own_.data() + begin, end - begin);
        else
          merge::gapless(own_, begin, end, window);
        ring.windows->arrive(ring.turn);
        group_.progress();
      }
    });
  }

  const gather::GatherCall& call_;
  HostsGroup& group_;
  const TensorView& own_;
  Tensor result_;
};

}  // namespace

std::unique_ptr<gather::Transfer> make_hosts_merge(const gather::GatherCall& call, HostsGroup& group) {
  return std::make_unique<HostsMerge>(call, group);
}

std::uint64_t merge_ring_bytes(Group& group, const std::vector<int>* senders) {
  std::uint64_t sum = 0;
  for (const auto& [sender, ring] : merge_rings_of(group)->own)
    if (senders == nullptr || std::ranges::find(*senders, sender) != senders->end()) sum += ring.bytes();
  return sum;
}

// Only the root frees its rings. A sender forgets its side of a ring when it receives the place of another one.
std::uint64_t trim_merge_rings(Group& group) {
  const std::uint64_t bytes = merge_ring_bytes(group);
  merge_rings_of(group)->own.clear();
  return bytes;
}

}  // namespace muster::multihost
