// SPDX-License-Identifier: Apache-2.0
// Collectives of ranks that share memory. Each rank has a block in its own region: its cards, a ring of chunks that
// only it fills, and words that publish its progress. All ranks map all blocks.
//
// An operation consists of steps, whose number is the same on all ranks. In each step every rank fills one chunk of its
// ring, and then the ranks read the chunks of all ranks. Steps are counted over all operations.
//
//  - The first chunk is filled before the cards are published. If one step is sufficient, no other synchronisation is
//    needed: entering the next round implies that a rank has read the previous one. The smallest inputs are stored
//    directly behind the card.
//  - With more steps, a chunk is refilled when the progress words of all ranks show that they have read it.
//  - A reduction of more than a few KiB has a second stage. Each rank reduces one slice of each chunk, from the chunks
//    of all ranks, into its own ring. Then all ranks read the slices.
//
// An input in an arena of its rank is read there, and the rank fills no chunks. A result that all ranks share is
// reduced or written directly into its memory, and no rank reads it from the rings.
//
// Words and cards have one writer each, so a killed rank leaves no lock behind. All waits are waits of the group.

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "src/collectives/backend.hpp"
#include "src/collectives/shared_buffers.hpp"
#include "src/group/error_propagation.hpp"
#include "src/merge/reduce.hpp"
#include "src/os/futex.hpp"
#include "src/os/pages.hpp"
#include "src/shm/arena_core.hpp"
#include "src/shm/stream_copy.hpp"

namespace muster::collectives {
namespace {

// Smaller chunks need more steps. If there are fewer chunks, ranks must wait for each other.
constexpr std::uint32_t chunk_bytes = 128 << 10;
constexpr std::uint32_t depth = 8;
// The smallest piece of a rank that only sends.
constexpr std::uint64_t least_piece = 16 << 10;
// Below this size, copying an input costs less than publishing that it has been read. In reductions all ranks publish
// that anyway.
constexpr std::uint64_t least_placed = 256 << 10;
constexpr std::uint64_t least_placed_to_reduce = 16 << 10;

/// The data that a rank publishes in the round of an operation. The fewer cache lines it uses, the sooner it arrives.
struct alignas(2 * line) Slot {
  Count opened;  // operations; published last
  CallHead head;
  std::array<std::byte, 1024 - sizeof(Count) - sizeof(CallHead) - sizeof(CallPlaces)> small;
  CallPlaces places;
};
static_assert(offsetof(Slot, small) + 16 == line);
/// The beginning of a block. Each word counts completed steps.
struct BlockHead {
  std::array<Slot, 2> slots;  // for even and odd operations; no rank is two operations ahead
  Word filled;                // steps that this rank has filled
  Word reduced;               // steps whose slices it has reduced
  Word read;                  // steps that it no longer needs
};
constexpr std::uint64_t ring_offset = 4096;
static_assert(sizeof(BlockHead) <= ring_offset);
static_assert(chunk_bytes / line == most_ranks_on_host);
constexpr std::uint64_t block_bytes = ring_offset + depth * chunk_bytes;

/// Returns the size up to which every rank reduces the whole input: a second stage would cost more than the additional
/// reads.
std::uint64_t all_reduce_alone(std::size_t ranks) noexcept {
  return ranks <= 4 ? 8 << 10 : 4 << 10;
}

class SharedBackend final : public Backend {
 public:
  SharedBackend(group::BaseGroup& group, const WaitOptions& options)
      : group_(group),
        blocks_(group, block_bytes, options),
        results_(group, 0, os::Access::read_write),
        cards_(static_cast<std::size_t>(group.size())),
        sources_(cards_.size()),
        placed_(cards_.size()) {
    late_.reserve(ranks());
  }
  SharedBackend& operator=(SharedBackend&&) = delete;
  ~SharedBackend() override { result_.withdraw(); }

  [[nodiscard]] std::string_view name() const noexcept override { return "shared memory"; }

  void all_reduce(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                  Room out, const WaitOptions& options) override {
    const Step first = next_;
    if (in.size() <= all_reduce_alone(ranks())) {
      open(card, opened, options, [&] { write(first_piece(self(), first, in.size()), in); });
      if (card.wants != 0)
        reduce(combine, dtype, out, [&](std::size_t rank) { return first_piece(rank, first, in.size()); });
      return end(first + 1);
    }
    reduce_slices(with_input(card, in, least_placed_to_reduce), opened, combine, dtype, in, out, Result::each, options);
  }

  HeldResult all_reduce_shared(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype,
                               Bytes in, const WaitOptions& options) override {
    HeldResult held;
    Room out;
    const auto then = [&](std::span<const CallSummary> cards) {
      opened(cards);
      held = take_result(in.size());
      out = {held.data, in.size()};
    };
    reduce_slices(with_result(with_input(card, in, least_placed_to_reduce), in.size()), then, combine, dtype, in, out,
                  Result::shared, options);
    return held;
  }

  void reduce_scatter(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                      std::span<const std::uint64_t> bounds, Room out, const WaitOptions& options) override {
    const std::uint64_t room = share();
    const CallSummary mine = with_input(card, in);
    const auto slice = [&](std::size_t rank) { return in.subspan(bounds[rank], bounds[rank + 1] - bounds[rank]); };
    const auto fill = [&](Step step, std::uint64_t at) {
      if (mine.input.arena != 0) return;
      for (std::size_t rank = 0; rank < ranks(); ++rank) {
        if (rank == self()) continue;
        const Bytes from = part_of(slice(rank), piece_of(slice(rank).size(), room, at));
        write(chunk(self(), step) + rank * room, from);
      }
    };
    const bool is_small = in.size() <= small_bytes;
    open(mine, opened, options, [&] { is_small ? write(small(self()), in) : fill(next_, 0); });
    const auto take = [&](Step step, std::uint64_t at) {
      const SlicePart part = piece_of(out.size(), room, at);
      reduce(combine, dtype, out.subspan(part.begin, part.bytes), [&](std::size_t rank) -> const std::byte* {
        if (rank == self()) return slice(self()).data() + part.begin;
        if (is_small) return small(rank) + bounds[self()] + part.begin;
        return placed_[rank] != nullptr ? placed_[rank] + bounds[self()] + part.begin
                                        : chunk(rank, step) + self() * room;
      });
    };
    run(pieces(largest(), room), fill, nullptr, take, options);
    until_read(mine, options);
  }

  void all_gather(const CallSummary& card, const Opened& opened, Bytes in, std::span<const Room> outs,
                  const WaitOptions& options) override {
    CallSummary mine = with_input(card, in);
    mine.piece = piece_bytes(mine);
    const auto part_at = [](const CallHead& its, std::uint64_t at) { return piece_of(its.bytes, its.piece, at); };
    const auto fill = [&](Step step, std::uint64_t at) {
      const Bytes from = part_of(in, part_at(mine, at));
      if (mine.input.arena == 0) write(at == 0 ? first_piece(self(), step, in.size()) : chunk(self(), step), from);
    };
    open(mine, opened, options, [&] { fill(next_, 0); });
    std::uint64_t all = 0;
    std::uint64_t steps = 1;
    for (const CallSummary& each : cards_) {
      if (each.piece == 0 || each.piece > chunk_bytes)
        group::or_fail(group_, [] {
          throw Error(ErrorKind::corrupt, "malformed message: a rank announces pieces that exceed a chunk");
        });
      all += each.bytes;
      steps = std::max(steps, pieces(each.bytes, each.piece));
    }
    const auto take = [&](Step step, std::uint64_t at) {
      if (card.wants == 0) return;
      for_each_rank([&](std::size_t rank) {
        const SlicePart part = part_at(cards_[rank], at);
        std::byte* const to = outs[rank].data() + part.begin;
        if (rank != self())
          put(to,
              placed_[rank] != nullptr ? placed_[rank] + part.begin
              : at == 0                ? first_piece(rank, step, cards_[rank].bytes)
                                       : chunk(rank, step),
              part.bytes, all);
        else if (to != in.data() + part.begin)
          put(to, in.data() + part.begin, part.bytes, all);
      });
    };
    run(steps, fill, nullptr, take, options);
    until_read(mine, options);
  }

  HeldResult all_gather_shared(const CallSummary& card, const Opened& opened, Bytes in, std::size_t count,
                               const WaitOptions& options) override {
    const std::uint64_t all = in.size() * count;
    HeldResult held;
    const auto then = [&](std::span<const CallSummary> cards) {
      opened(cards);
      held = take_result(all);
    };
    open(with_result(card, all), then, options, [] {});
    put(held.data + self() * in.size(), in.data(), in.size(), all);
    shm::publish_fence();
    head(self()).reduced.publish(begun_ + 1);
    await(&BlockHead::reduced, begun_ + 1, options);
    end(begun_ + 1);
    return held;
  }

  void all_to_all(const CallSummary& card, const Opened& opened, std::span<const Bytes> ins, std::span<const Room> outs,
                  const WaitOptions& options) override {
    const std::uint64_t room = share();
    const auto fill = [&](Step step, std::uint64_t at) {
      for (std::size_t rank = 0; rank < ranks(); ++rank) {
        if (rank == self()) continue;
        const Bytes from = part_of(ins[rank], piece_of(ins[rank].size(), room, at));
        write(chunk(self(), step) + rank * room, from);
      }
    };
    open(card, opened, options, [&] { fill(next_, 0); });
    const auto take = [&](Step step, std::uint64_t at) {
      for_each_rank([&](std::size_t rank) {
        const SlicePart part = piece_of(outs[rank].size(), room, at);
        const std::byte* const from =
            rank == self() ? ins[self()].data() + part.begin : chunk(rank, step) + self() * room;
        put(outs[rank].data() + part.begin, from, part.bytes, outs[rank].size() * ranks());
      });
    };
    run(pieces(largest(), room), fill, nullptr, take, options);
  }

 private:
  using Step = std::uint32_t;
  struct SlicePart {
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
  };
  /// Returns part `at` of `bytes` bytes in parts of `each` bytes. Behind the last part, parts are empty.
  static SlicePart piece_of(std::uint64_t bytes, std::uint64_t each, std::uint64_t at) noexcept {
    const std::uint64_t begin = std::min(bytes, at * each);
    return {begin, std::min(each, bytes - begin)};
  }
  static std::uint64_t pieces(std::uint64_t bytes, std::uint64_t each) noexcept {
    return std::max<std::uint64_t>(1, (bytes + each - 1) / each);
  }
  /// Returns the size of the pieces of this rank's input of an all_gather. A rank that only sends uses smaller ones, so
  /// that the others read the first pieces while it writes the next. If ranks share cores, they would take turns too
  /// often.
  [[nodiscard]] std::uint32_t piece_bytes(const CallHead& card) const noexcept {
    if (card.wants != 0 || !has_cores_) return chunk_bytes;
    return static_cast<std::uint32_t>(
        std::clamp<std::uint64_t>(card.bytes / 8 / line * line, least_piece, chunk_bytes));
  }
  static Bytes part_of(Bytes all, SlicePart part) noexcept { return all.subspan(part.begin, part.bytes); }

  [[nodiscard]] std::size_t ranks() const noexcept { return cards_.size(); }
  [[nodiscard]] std::size_t self() const noexcept { return static_cast<std::size_t>(group_.rank()); }
  [[nodiscard]] BlockHead& head(std::size_t rank) const noexcept {
    return *reinterpret_cast<BlockHead*>(blocks_.of(rank));
  }
  [[nodiscard]] std::byte* chunk(std::size_t rank, Step step) const noexcept {
    return blocks_.of(rank) + ring_offset +
           std::uint64_t{(first_chunk(operation_) + step - begun_) % depth} * chunk_bytes;
  }
  /// Returns the chunk of the first step of an operation. Operations take turns at the two halves of the ring: a rank
  /// fills its first chunk while others may still read the last operation. Short operations then use few cache lines.
  static constexpr Step first_chunk(std::uint32_t operation) noexcept { return operation % 2 * (depth / 2); }
  /// Returns the slot for the operation that is open or about to be opened.
  [[nodiscard]] Slot& slot(std::size_t rank) const noexcept { return head(rank).slots[operation_ % 2]; }
  static constexpr std::uint64_t small_bytes = sizeof(Slot::small);
  [[nodiscard]] std::byte* small(std::size_t rank) const noexcept { return slot(rank).small.data(); }
  /// Returns the position of the first piece of a rank. `bytes` is its total size.
  [[nodiscard]] std::byte* first_piece(std::size_t rank, Step step, std::uint64_t bytes) const noexcept {
    return bytes <= small_bytes ? small(rank) : chunk(rank, step);
  }
  /// Returns the part of a chunk for one of the receiving ranks.
  [[nodiscard]] std::uint64_t share() const noexcept {
    return std::max<std::uint64_t>(line, chunk_bytes / ranks() / line * line);
  }
  /// Returns the largest piece of the operation that has been opened.
  [[nodiscard]] std::uint64_t largest() const noexcept {
    return std::ranges::max(cards_, {}, &CallSummary::largest).largest;
  }
  /// Each rank begins with itself, so that the ranks do not all read the same block at once.
  template <class Call>
  void for_each_rank(const Call& call) const {
    for (std::size_t i = 0; i < ranks(); ++i) call((self() + i) % ranks());
  }
  template <class At>
  void reduce(merge::Combine combine, DType dtype, Room target, const At& at) {
    for (std::size_t rank = 0; rank < ranks(); ++rank) sources_[rank] = at(rank);
    merge::reduce(combine, dtype, target, sources_);
  }
  static void write(std::byte* to, Bytes from) noexcept {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
  }
  /// `all` is the size of the data that the operation writes on each rank. If the data of all ranks exceeds the
  /// last-level cache, the copy bypasses the cache.
  void put(std::byte* to, const std::byte* from, std::uint64_t bytes, std::uint64_t all) const noexcept {
    if (bytes == 0) return;
    if (all * ranks() > cache_bytes_)
      shm::stream_piece(to, from, bytes);
    else
      std::memcpy(to, from, bytes);
  }

  /// A sufficiently large input in an arena is read there.
  [[nodiscard]] CallSummary with_input(CallSummary card, Bytes in, std::uint64_t least = least_placed) const {
    if (in.size() < least || card.status != 0) return card;
    if (const auto found = detail::ArenaCore::find(in.data(), in.size()))
      card.input = {found->arena->segment().place(), found->offset};
    return card;
  }
  /// Returns the input in the arena of another rank.
  [[nodiscard]] const std::byte* placed_input(std::size_t rank) {
    const InputPlace& place = cards_[rank].input;
    const auto segment = arenas_.at(group_, static_cast<int>(rank), place.arena);
    if (place.offset > segment->capacity() || cards_[rank].bytes > segment->capacity() - place.offset)
      throw Error(ErrorKind::corrupt, "malformed message: it names an address outside the arena of its sender");
    return segment->data() + place.offset;
  }
  /// Rank 0 offers memory for a result of `bytes` bytes. If a call failed, leases of the last offer that no rank has
  /// taken are withdrawn.
  [[nodiscard]] CallSummary with_result(CallSummary card, std::uint64_t bytes) {
    if (self() != 0 || card.status != 0) return card;
    result_.withdraw();
    result_ = group::or_fail(group_, [&] { return results_.lend(bytes, group_.all()); });
    card.result = result_.offer;
    return card;
  }
  HeldResult take_result(std::uint64_t bytes) {
    return group::or_fail(group_, [&] { return results_.take(cards_[0].result, self(), bytes); });
  }
  /// Waits until the other ranks have read the input in this rank's arena, which then belongs to the caller again.
  void until_read(const CallSummary& mine, const WaitOptions& options) {
    if (mine.input.arena != 0) await(&BlockHead::read, next_, options);
  }

  enum class Result : std::uint8_t { each, shared };

  /// Each rank reduces one slice of each part from the inputs of all ranks. It writes the slice into its ring, from
  /// which all ranks read it, or into the shared result. `out` is known when the operation is open.
  void reduce_slices(const CallSummary& mine, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                     const Room& out, Result result, const WaitOptions& options) {
    const bool is_shared = result == Result::shared;
    std::uint64_t each = chunk_bytes;
    const auto part = [&](std::uint64_t step) { return piece_of(in.size(), each, step); };
    const auto bounds = [&](std::uint64_t bytes, std::size_t rank) {
      return SlicePart{slice_begin(bytes, ranks(), rank),
                       slice_begin(bytes, ranks(), rank + 1) - slice_begin(bytes, ranks(), rank)};
    };
    // No other rank reads the slice that this rank reduces itself, so it is not copied into the ring.
    const auto fill = [&](Step step, std::uint64_t at) {
      if (mine.input.arena != 0) return;
      const Bytes from = part_of(in, part(at));
      const SlicePart own = bounds(from.size(), self());
      write(chunk(self(), step), from.first(own.begin));
      write(chunk(self(), step) + own.begin + own.bytes, from.subspan(own.begin + own.bytes));
    };
    open(mine, opened, options, [&] { fill(next_, 0); });
    // No data passes through the rings.
    if (is_shared && std::ranges::all_of(cards_, [](const CallSummary& card) { return card.input.arena != 0; }))
      each = std::max<std::uint64_t>(in.size(), 1);
    const auto make = [&](Step step, std::uint64_t at) {
      const SlicePart whole = part(at);
      const SlicePart own = bounds(whole.bytes, self());
      const auto reduce_to = [&](Room target, std::uint64_t begin) {
        reduce(combine, dtype, target, [&](std::size_t rank) {
          if (rank == self()) return in.data() + whole.begin + begin;
          return placed_[rank] != nullptr ? placed_[rank] + whole.begin + begin : chunk(rank, step) + begin;
        });
      };
      if (is_shared) return reduce_to(out.subspan(whole.begin + own.begin, own.bytes), own.begin);
      for (std::uint64_t begin = own.begin; begin < own.begin + own.bytes; begin += reduced_.size()) {
        const Room block = Room(reduced_).first(std::min(reduced_.size(), own.begin + own.bytes - begin));
        reduce_to(block, begin);
        write(chunk(self(), step) + begin, block);
        if (mine.wants != 0) put(out.data() + whole.begin + begin, block.data(), block.size(), out.size());
      }
    };
    const auto take = [&](Step step, std::uint64_t at) {
      if (mine.wants == 0 || is_shared) return;
      const Room to = out.subspan(part(at).begin, part(at).bytes);
      for_each_rank([&](std::size_t rank) {
        if (rank == self()) return;
        const SlicePart from = bounds(to.size(), rank);
        put(to.data() + from.begin, chunk(rank, step) + from.begin, from.bytes, out.size());
      });
    };
    run(pieces(in.size(), each), fill, make, take, options);
  }

  /// Waits until this counter has reached the value on all ranks.
  template <class CountOf>
  void await_all(const CountOf& count_of, std::uint32_t reached, const WaitOptions& options) {
    for (;;) {
      late_.clear();
      for (std::size_t rank = 0; rank < ranks(); ++rank)
        if (rank != self() && !count_of(rank).has_reached(reached)) late_.push_back(static_cast<int>(rank));
      if (late_.empty()) return;
      Count& first = count_of(static_cast<std::size_t>(late_.front()));
      wait_on(group_, first, late_, turns_, options, [&] { return first.has_reached(reached); });
    }
  }
  void await(Word BlockHead::*word, std::uint32_t reached, const WaitOptions& options) {
    await_all([&](std::size_t rank) -> Count& { return head(rank).*word; }, reached, options);
  }
  [[nodiscard]] bool all_have(Word BlockHead::*word, std::uint32_t count) const noexcept {
    for (std::size_t i = 1; i < ranks(); ++i)
      if (!(head((self() + i) % ranks()).*word).has_reached(count)) return false;
    return true;
  }

  /// `fill` writes this rank's chunk of the first step.
  template <class Fill>
  void open(const CallSummary& card, const Opened& opened, const WaitOptions& options, const Fill& fill) {
    // All ranks have read the data of the operation before the last. The last one may have used the same chunk, if it
    // was longer than half of the ring. Then their counters show that they have read it.
    if (const Step steps = next_ - begun_; steps > depth / 2)
      await(&BlockHead::read, begun_ + (steps - 1 - depth / 2) / depth * depth + depth / 2 + 1, options);
    ++operation_;
    begun_ = next_;
    if (card.status == 0) fill();
    Slot& mine = slot(self());
    mine.head = card;
    mine.head.has_places = card.input.arena != 0 || card.result.place != 0 ? 1 : 0;
    if (mine.head.has_places != 0) mine.places = card;
    head(self()).filled.value.store(next_ + 1, std::memory_order_relaxed);
    // Their lines arrive while publish() waits for this rank's.
    for (std::size_t rank = 0; rank < ranks() && has_cores_; ++rank)
      if (rank != self()) __builtin_prefetch(&slot(rank));
    mine.opened.publish(operation_);
    await_all([&](std::size_t rank) -> Count& { return slot(rank).opened; }, operation_, options);
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
      const Slot& its = slot(rank);
      cards_[rank] = {its.head, its.head.has_places != 0 ? its.places : CallPlaces()};
    }
    try {
      opened(cards_);
      for (std::size_t rank = 0; rank < ranks(); ++rank) {
        const CallSummary& its = cards_[rank];
        placed_[rank] = nullptr;
        if (rank != self() && its.input.arena != 0)
          placed_[rank] = group::or_fail(group_, [&] { return placed_input(rank); });
      }
    } catch (...) {
      // This happens on all ranks. The first step is used up in any case.
      end(begun_ + 1);
      throw;
    }
  }

  void end(Step next) noexcept {
    BlockHead& mine = head(self());
    mine.filled.value.store(next, std::memory_order_relaxed);
    mine.reduced.value.store(next, std::memory_order_relaxed);
    mine.read.value.store(next, std::memory_order_release);
    next_ = next;
  }

  /// Executes the steps of an operation that has been opened. Each iteration runs the latest stage that is ready:
  /// take(), then make(), then fill(). fill() writes this rank's chunk. make() processes a chunk that all ranks have
  /// filled, if there is such a stage. take() reads a chunk that is filled and made. Each of them gets the step, and
  /// its index in the operation.
  template <class Fill, class Make, class Take>
  void run(std::uint64_t steps, const Fill& fill, const Make& make, const Take& take, const WaitOptions& options) {
    constexpr bool has_make = !std::is_same_v<Make, std::nullptr_t>;
    BlockHead& mine = head(self());
    const Step begin = begun_;
    const Step end_step = begin + static_cast<Step>(steps);
    if (steps == 1 && !has_make) {
      take(begin, 0);
      shm::publish_fence();
      // Ranks whose inputs were read in their arenas wait for this word.
      if (std::ranges::any_of(placed_, [](const std::byte* place) { return place != nullptr; }))
        mine.read.publish(end_step);
      end(end_step);
      return;
    }
    Step filled = begin + 1;
    Step made = begin;
    Step taken = begin;
    while (taken != end_step) {
      Word BlockHead::*const ready = has_make ? &BlockHead::reduced : &BlockHead::filled;
      if ((has_make ? made : filled) != taken && all_have(ready, taken + 1)) {
        take(taken, taken - begin);
        mine.read.publish(++taken);
        group_.progress();
      } else if (has_make && filled != made && all_have(&BlockHead::filled, made + 1)) {
        if constexpr (has_make) make(made, made - begin);
        mine.reduced.publish(++made);
      } else if (filled != end_step && filled - taken < depth &&
                 (filled - begin < depth || all_have(&BlockHead::read, filled + 1 - depth))) {
        fill(filled, filled - begin);
        mine.filled.publish(++filled);
      } else if ((has_make ? made : filled) != taken) {
        await(ready, taken + 1, options);
      } else if (filled != made && has_make) {
        await(&BlockHead::filled, made + 1, options);
      } else {
        await(&BlockHead::read, filled + 1 - depth, options);
      }
    }
    shm::publish_fence();
    end(end_step);
  }

  group::BaseGroup& group_;
  SharedBlocks blocks_;
  shm::RemoteSegments arenas_;  // of other ranks
  LentMemory results_;          // memory of rank 0; all ranks hold leases
  Loan result_;                 // the last one
  std::uint64_t cache_bytes_ = os::last_level_cache();
  int turns_ = os::spin_iterations(group_.size());
  bool has_cores_ = group_.size() <= os::usable_cores();
  std::uint32_t operation_ = 0;
  Step next_ = 0;   // first step of the next operation
  Step begun_ = 0;  // first step of the last operation
  // The state of the current call.
  std::vector<CallSummary> cards_;
  std::vector<const std::byte*> sources_;
  // Reduced elements go through this buffer. The stores of a reduction first fetch each line of the ring from the core
  // that has read it last; memcpy overwrites it without that.
  std::vector<std::byte> reduced_ = std::vector<std::byte>(16 << 10);
  std::vector<const std::byte*> placed_;  // inputs in arenas; null if the rank fills chunks
  std::vector<int> late_;
};

}  // namespace

std::unique_ptr<Backend> shared_backend(group::BaseGroup& group, const WaitOptions& options) {
  if (!SharedBlocks::can_be(group)) return nullptr;
  return std::make_unique<SharedBackend>(group, options);
}

}  // namespace muster::collectives
