// SPDX-License-Identifier: Apache-2.0
// Merging across hosts: ranks of other hosts send to the first rank by MPI, those of its own host write what they would
// send into windows of shared memory (merge_rings.hpp).
//
//  1. offer: every rank checks that its tensor can be merged; the first rank tells what memory it has and may take. All
//     see from the records whether the merged tensor and the window fit (receive_need.hpp).
//  2. All compute the same layout from the records. A sender says that it is ready; the first rank takes memory, opens
//     receives and says yes to all, or no to all.
//  3. A tensor whose bytes lie together in the merged one (concat along the first dimension, stack) is received where
//     it belongs. Any other comes through the window: two pieces a sender, whose rows are copied to their places while
//     the next piece is under way.
//  4. Of max and sum the window holds a piece of every sender: when all have come they are reduced into the merged
//     tensor, the sources in the order of the list, so that the bits are those of the other routes.
//  5. The first rank's own tensor is copied meanwhile.
//  6. A sender of the first rank's host has no receives: its pieces are windows of a ring, taken like the others.
// So the first rank has the merged tensor and the window, never the senders' tensors.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "src/core/element_range.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/opening.hpp"
#include "src/gather/receive_need.hpp"
#include "src/gather/shm_protocol.hpp"
#include "src/merge/reduce.hpp"
#include "src/merge/rows.hpp"
#include "src/mpi/merge_rings.hpp"
#include "src/mpi/mpi_route.hpp"
#include "src/shm/stream_copy.hpp"
#include "src/sync/failing.hpp"

namespace muster::mpi {
namespace {

using gather::Record;

// Of this rank's own tensor, between two looks at MPI.
constexpr std::uint64_t own_piece = 1 << 20;
constexpr std::uint64_t most_open = 2;  // pieces of the window a sender

/// What all ranks of the list know from the records.
struct Plan {
  merge::Layout layout;
  merge::Rows rows;
  std::vector<std::uint64_t> bytes;  // of each source
  std::uint64_t window_piece = 0;
  std::vector<bool> is_near;  // a source writes into a ring of the first rank's

  Plan(const gather::Call& call, const MpiGroup& group, std::span<const Record> records)
      : layout(gather::merge_layout(*call.merge, spec_of(call), call.list, records)), rows(merge::rows_of(layout)) {
    std::uint64_t largest = 0;
    for (const int rank : call.list) {
      bytes.push_back(records[static_cast<std::size_t>(rank)].moving_bytes);
      largest = std::max(largest, bytes.back());
      is_near.push_back(!goes_by_mpi(call, group, rank));
    }
    window_piece = gather::merge_piece_bytes(call.list.size() - 1, largest);
  }
  static TensorSpec spec_of(const gather::Call& call) {
    const TensorView& own = call.value->as_tensor().view();
    return {own.dtype(), own.shape()};
  }
  [[nodiscard]] bool reduces() const { return layout.combine != merge::Combine::copy; }
  /// Where a source lies in the merged tensor, where its bytes lie together there.
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
};

/// The elements of [begin, end) of a tensor's bytes: where they are, or copied to `staging`.
const std::byte* elements_of(const TensorView& tensor, std::uint64_t begin, std::uint64_t end, std::byte* staging) {
  if (tensor.is_contiguous()) return tensor.data() + begin;
  const auto item = static_cast<std::uint64_t>(itemsize(tensor.dtype()));
  core::copy_elements(tensor, static_cast<std::int64_t>(begin / item), static_cast<std::int64_t>(end / item), staging);
  return staging;
}

/// The first rank's answer to a sender.
struct MergeWord {
  std::uint64_t is_well = 0;
  std::uint64_t ring = 0;  ///< of a near one: its place
};

/// Steps 2 to 5 on the first rank.
class Receiving final : public Inflow::Sink {
 public:
  Receiving(const gather::Call& call, MpiGroup& group, BufferPool& pool, Plan plan)
      : call_(call), group_(group), pool_(pool), plan_(std::move(plan)), own_(call.value->as_tensor().view()) {}

  void run();
  Tensor result();

 private:
  void take_memory();
  bool take_heads();
  void make_rings();
  void answer(bool is_well);
  [[nodiscard]] bool takes(std::size_t lane, std::size_t piece) const override {
    return piece < (plan_.reduces() ? reduced_ : done_[lane]) + most_open;
  }
  std::span<std::byte> place(std::size_t lane, std::size_t piece) override;
  std::shared_ptr<const void> keeper(std::size_t lane) override;
  void arrived(std::size_t lane, std::size_t piece) override;
  bool work() override;
  [[nodiscard]] bool has_work_left() const override { return !plan_.reduces() && own_done_ < own_.nbytes(); }
  [[nodiscard]] std::byte* slot(std::size_t lane, std::size_t piece) const {
    if (rings_[lane] != nullptr) return rings_[lane]->windows->window(turn(lane, piece)).data();
    return window_.data.get() + (first_slot_[lane] + piece % most_open) * plan_.window_piece;
  }
  [[nodiscard]] std::uint64_t bytes_of(std::size_t source, std::size_t piece) const {
    const std::uint64_t size = plan_.piece_bytes(source);
    return std::min(size, plan_.bytes[source] - piece * size);
  }
  [[nodiscard]] std::uint32_t turn(std::size_t lane, std::size_t piece) const {
    return rings_[lane]->turn + static_cast<std::uint32_t>(piece);
  }
  void release(std::size_t lane, std::size_t piece) {
    if (rings_[lane] != nullptr) rings_[lane]->windows->release(turn(lane, piece));
  }
  void copy_rows(std::size_t source, std::uint64_t begin, std::uint64_t end, const std::byte* from);
  void reduce_piece(std::size_t piece);

  const gather::Call& call_;
  MpiGroup& group_;
  BufferPool& pool_;
  Plan plan_;
  const TensorView& own_;
  BufferPool::Buffer target_;
  BufferPool::Buffer window_;
  std::vector<std::byte> staging_;                      // of own strided elements
  std::vector<std::optional<std::uint64_t>> straight_;  // by lane, which is the source less one
  std::vector<std::uint64_t> first_slot_;               // of the window, by lane
  std::vector<ParcelHead> heads_;
  std::vector<MergeRing*> rings_;           // of near senders
  std::vector<std::size_t> done_;           // pieces of each lane
  std::vector<std::size_t> here_ = {0, 0};  // of a piece that is reduced: senders whose part has come
  std::size_t reduced_ = 0;
  std::uint64_t own_done_ = 0;
};

void Receiving::run() {
  const WaitOptions wait = call_.wait("merge: receiving");
  done_.resize(call_.list.size() - 1);
  rings_.resize(call_.list.size() - 1);
  heads_.resize(call_.list.size() - 1);
  std::optional<Error> failure = gather::attempt(group_, [&] { take_memory(); });
  const bool all_are_well = take_heads();
  if (all_are_well && !failure) failure = gather::attempt(group_, [&] { make_rings(); });
  const bool goes_on = all_are_well && !failure;
  std::optional<Inflow> inflow;
  // Where only some receives are open they would take pieces of the next exchange.
  if (goes_on)
    sync::or_fail(group_, [&] {
      std::vector<Inflow::Lane> lanes;
      for (std::size_t source = 1; source < call_.list.size(); ++source) {
        const MergeRing* ring = rings_[source - 1];
        lanes.push_back({call_.list[source], plan_.pieces(source), ring == nullptr ? nullptr : ring->windows.get(),
                         ring == nullptr ? 0 : ring->turn});
      }
      inflow.emplace(group_, lanes, *this).open();
    });
  answer(goes_on);
  if (inflow) inflow->run(wait);
  for (std::size_t lane = 0; !goes_on && lane < rings_.size(); ++lane)
    if (rings_[lane] != nullptr && rings_[lane]->place != heads_[lane].ring) rings_[lane]->windows->not_told();
  shm::publish_fence();
  if (goes_on)
    for (std::size_t lane = 0; lane < rings_.size(); ++lane)
      if (rings_[lane] != nullptr) rings_[lane]->turn = turn(lane, plan_.pieces(lane + 1));
  window_ = {};
  if (failure) throw *failure;
}

void Receiving::take_memory() {
  const std::uint64_t target = byte_size(plan_.layout.target.dtype, plan_.layout.target.shape);
  std::uint64_t slots = 0;
  for (std::size_t source = 1; source < call_.list.size(); ++source) {
    straight_.push_back(plan_.straight(source));
    first_slot_.push_back(slots);
    if (!straight_.back() && !plan_.is_near[source] && plan_.bytes[source] != 0) slots += most_open;
  }
  const std::uint64_t window = slots * plan_.window_piece;
  std::vector<BufferPool::Buffer> buffers =
      pool_.take(std::array<std::uint64_t, 2>{target, window}, call_.options->pool_limit);
  target_ = std::move(buffers[0]);
  window_ = std::move(buffers[1]);
  if (plan_.rows.has_gaps && target != 0) std::memset(target_.data.get(), 0, target);
  if (!own_.is_contiguous()) staging_.resize(std::min(own_.nbytes(), plan_.reduces() ? plan_.window_piece : own_piece));
}

/// Whether all senders are ready.
bool Receiving::take_heads() {
  bool all_are_well = true;
  for (std::size_t source = 1; source < call_.list.size(); ++source) {
    if (plan_.bytes[source] == 0) continue;
    ParcelHead& head = heads_[source - 1];
    const std::vector<std::byte> message =
        gather::receive_of(call_, call_.list[source], largest_piece, "merge: receiving");
    if (message.size() < sizeof head) throw Error(ErrorKind::corrupt, "a message of a rank is too short");
    std::memcpy(&head, message.data(), sizeof head);
    all_are_well = all_are_well && head.is_well != 0;
  }
  return all_are_well;
}

/// Before any sender is told to send: it may fail.
void Receiving::make_rings() {
  for (std::size_t source = 1; source < call_.list.size(); ++source) {
    if (!plan_.is_near[source] || plan_.bytes[source] == 0) continue;
    rings_[source - 1] = &merge_rings_of(group_)->give(call_.list[source], heads_[source - 1].ring, plan_.window_piece);
  }
}

void Receiving::answer(bool is_well) {
  const WaitOptions wait = call_.wait("merge: receiving");
  for (std::size_t source = 1; source < call_.list.size(); ++source) {
    // One that cannot send does not wait for the word, and would find it in its next exchange.
    if (plan_.bytes[source] == 0 || heads_[source - 1].is_well == 0) continue;
    const MergeRing* ring = rings_[source - 1];
    const MergeWord word{is_well ? 1U : 0U, is_well && ring != nullptr ? ring->place : 0};
    group_.send(call_.list[source], std::as_bytes(std::span(&word, 1)), wait, Subject::exchange);
  }
}

std::span<std::byte> Receiving::place(std::size_t lane, std::size_t piece) {
  const std::uint64_t bytes = bytes_of(lane + 1, piece);
  if (straight_[lane]) return {target_.data.get() + *straight_[lane] + piece * cut_piece, bytes};
  if (!takes(lane, piece)) return {};
  return {slot(lane, piece), bytes};
}

std::shared_ptr<const void> Receiving::keeper(std::size_t lane) {
  return straight_[lane] ? target_.data : window_.data;
}

void Receiving::arrived(std::size_t lane, std::size_t piece) {
  done_[lane] = piece + 1;
  if (straight_[lane]) return;
  if (!plan_.reduces()) {
    const std::uint64_t begin = piece * plan_.window_piece;
    copy_rows(lane + 1, begin, begin + bytes_of(lane + 1, piece), slot(lane, piece));
    release(lane, piece);
    return;
  }
  ++here_[piece % most_open];
  while (here_[reduced_ % most_open] == done_.size()) {
    reduce_piece(reduced_);
    for (std::size_t each = 0; each < done_.size(); ++each) release(each, reduced_);
    here_[reduced_ % most_open] = 0;
    ++reduced_;
  }
}

void Receiving::reduce_piece(std::size_t piece) {
  const std::uint64_t begin = piece * plan_.window_piece;
  const std::uint64_t bytes = bytes_of(0, piece);
  std::vector<const std::byte*> parts{elements_of(own_, begin, begin + bytes, staging_.data())};
  for (std::size_t lane = 0; lane < done_.size(); ++lane) parts.push_back(slot(lane, piece));
  merge::reduce(plan_.layout.combine, own_.dtype(), {target_.data.get() + begin, bytes}, parts);
}

bool Receiving::work() {
  if (!has_work_left()) return false;
  const std::uint64_t end = std::min(own_done_ + own_piece, own_.nbytes());
  copy_rows(0, own_done_, end, elements_of(own_, own_done_, end, staging_.data()));
  own_done_ = end;
  return true;
}

/// Bytes [begin, end) of a source, which lie at `from`, to their places.
void Receiving::copy_rows(std::size_t source, std::uint64_t begin, std::uint64_t end, const std::byte* from) {
  for (const merge::Rectangle& part : merge::rectangles_of(plan_.rows, static_cast<int>(source), begin, end))
    shm::stream_rows(target_.data.get() + part.to, part.to_stride, from + part.from, part.from_stride, part.bytes,
                     part.rows);
}

Tensor Receiving::result() {
  return {TensorView(plan_.layout.target.dtype, std::move(plan_.layout.target.shape), target_.data.get()),
          target_.data};
}

class MpiMerge final : public gather::Transfer {
 public:
  MpiMerge(const gather::Call& call, MpiGroup& group)
      : call_(call), group_(group), pool_(buffer_pool_of(group)), own_(call.value->as_tensor().view()) {}

  void offer(Record& record) override {
    if (call_.is_first()) offer_to_receive(call_, *pool_, record);
    record.merge = gather::merge_number(*call_.merge);
    record.payload_bytes = record.moving_bytes = own_.nbytes();
    record.facts[gather::fact_extent] =
        static_cast<std::uint64_t>(gather::merge_extent(*call_.merge, TensorSpec{own_.dtype(), own_.shape()}));
  }

  void move(std::span<const Record> records, ExchangeReport& report) override {
    Plan plan(call_, group_, records);
    for (std::size_t source = 1; source < plan.bytes.size(); ++source)
      if (!plan.is_near[source] && (call_.is_first() || source == call_.position))
        report.mpi_bytes += plan.bytes[source];
    if (!call_.is_first()) return send(plan);
    Receiving receiving(call_, group_, *pool_, std::move(plan));
    receiving.run();
    result_ = receiving.result();
  }

  std::vector<std::optional<Config>> deliver() override {
    std::vector<std::optional<Config>> entries(1);
    entries.front() = Config(std::move(result_));
    return entries;
  }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override {
    return pool_->bytes() + merge_rings_of(group_)->bytes();
  }

 private:
  void send(const Plan& plan) {
    if (own_.nbytes() == 0) return;
    const WaitOptions wait = call_.wait("merge: sending");
    const bool is_near = plan.is_near[call_.position];
    MergeRing& ring = merge_rings_of(group_)->of(call_.first());
    Outflow flow(group_, call_.first());
    ParcelHead head{call_.number, 1, is_near ? ring.place : 0};
    const auto say = [&] { group_.send(call_.first(), std::as_bytes(std::span(&head, 1)), wait, Subject::exchange); };
    try {
      if (!own_.is_contiguous() && !is_near)
        flow.prepare(*pool_, plan.pieces(call_.position), plan.piece_bytes(call_.position), call_.options->pool_limit);
    } catch (...) {
      head.is_well = 0;
      say();
      throw;
    }
    say();
    MergeWord word;
    const std::vector<std::byte> answer = group_.receive(call_.first(), sizeof word, wait, Subject::exchange);
    if (answer.size() == sizeof word) std::memcpy(&word, answer.data(), sizeof word);
    if (word.is_well == 0) return;
    sync::or_fail(group_, [&] {
      if (is_near)
        write_pieces(plan, ring, word, wait);
      else
        send_pieces(plan, flow, wait);
    });
  }

  void send_pieces(const Plan& plan, Outflow& flow, const WaitOptions& wait) {
    const std::uint64_t size = plan.piece_bytes(call_.position);
    for (std::uint64_t begin = 0; begin < own_.nbytes(); begin += size) {
      const std::uint64_t end = std::min(begin + size, own_.nbytes());
      const std::shared_ptr<std::byte> buffer = own_.is_contiguous() ? nullptr : flow.buffer(wait);
      const std::byte* from = elements_of(own_, begin, end, buffer.get());
      flow.send({from, end - begin}, buffer ? buffer : call_.value->as_tensor().owner(), wait);
    }
    flow.finish(wait);
  }

  /// The same through the windows of the first rank.
  void write_pieces(const Plan& plan, MergeRing& ring, const MergeWord& word, const WaitOptions& wait) {
    if (word.ring != ring.place)
      ring = {word.ring, std::make_shared<shm::WindowRing>(*group_.region_of(call_.first()), word.ring), 0};
    const std::uint64_t size = plan.window_piece;
    if (ring.windows->window_bytes() < size)
      throw Error(ErrorKind::corrupt, "the first rank of a merge gives windows that are too small");
    for (std::uint64_t begin = 0; begin < own_.nbytes(); begin += size, ++ring.turn) {
      const std::uint64_t end = std::min(begin + size, own_.nbytes());
      ring.windows->claim(ring.turn, call_.first(), group_, wait);
      std::byte* window = ring.windows->window(ring.turn).data();
      if (own_.is_contiguous())
        shm::stream_copy(window, own_.data() + begin, end - begin);
      else
        elements_of(own_, begin, end, window);
      ring.windows->arrive(ring.turn);
      group_.progress();
    }
  }

  const gather::Call& call_;
  MpiGroup& group_;
  std::shared_ptr<BufferPool> pool_;
  const TensorView& own_;
  Tensor result_;
};

}  // namespace

std::unique_ptr<gather::Transfer> make_mpi_merge(const gather::Call& call, MpiGroup& group) {
  return std::make_unique<MpiMerge>(call, group);
}

}  // namespace muster::mpi
