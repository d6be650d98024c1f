// SPDX-License-Identifier: Apache-2.0
// Merging over shared memory: one segment of the root, written by all ranks of the list.
//
//  1. Offer: every rank checks that its tensor can be merged at all. The root looks in its pool, which has one lane per
//     list, for a free slot of the expected size, and puts it into its record. It allocates nothing.
//  2. Move: all ranks compute the same layout from the records. If the offered slot already has the memory that is
//     needed ("warm"), every rank of the list has mapped it and begins to write at once.
//  3. Otherwise the root creates a slot, or takes more memory for the existing one, and sends its place to the other
//     ranks (shm_route.hpp). Place 0 means that it failed; round 2 reports the reason.
//  4. If ranks will wait for each other (max, sum), the ranks of step 3 reply with a note whether they have mapped the
//     slot. The root then announces whether all have (MergeWords).
//  5. Every rank copies its pieces to their places, or reduces its share.
// The lease on the slot ends when the merged tensor is released, or when the merge fails.

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>

#include "src/base/message.hpp"
#include "src/gather/merge_record.hpp"
#include "src/gather/opening.hpp"
#include "src/gather/route.hpp"
#include "src/gather/shm_route.hpp"
#include "src/merge/layout.hpp"
#include "src/merge/reduce.hpp"
#include "src/os/futex.hpp"
#include "src/os/pages.hpp"
#include "src/os/process.hpp"
#include "src/shm/stream_copy.hpp"

namespace muster::gather {
namespace {

constexpr std::uint64_t piece_bytes = 4 << 20;    // bytes between two progress reports
constexpr std::uint64_t staging_bytes = 1 << 20;  // bytes of strided elements that are staged at a time
constexpr const char* handing_out = "merge: receiving";

// For fresh memory. pwrite needs no page fault and no zeroing, and is about three times as fast as a copy that faults
// memory in page by page. But concurrent writes into one file wait for each other, so pwrite is used only if at most
// this many ranks run at a time. For short rows the calls cost more than they gain.
constexpr int writers_at_once = 3;
constexpr std::uint64_t written_from = 16 << 10;
// If rows of several ranks interleave, rows of at least this length are populated one by one.
constexpr std::uint64_t populated_from = 64 << 10;

// Reducing in shared memory: all ranks of a list work on one chunk of the tensor after the other, each on its share.
//
//  1. Each rank writes its own elements of the chunk into its place in the scratch area, and publishes this
//     ("written").
//  2. When all ranks have written a chunk, each rank reduces its share from all places into the target, and publishes
//     this ("reduced").
//  3. There are two scratch areas: a rank writes chunk k + 1 before it reduces its share of chunk k. It writes chunk k
//     + 2 when all ranks have reduced chunk k.
// Each field contains the number of the exchange, so that values of an earlier exchange are ignored. A rank that fails
// sets "given up"; the other ranks then stop, and receive the reason in round 2. The group's watchdog detects a rank
// that dies.

constexpr std::uint64_t line_bytes = 64;

/// The synchronization words of the ranks at the beginning of a merge's segment, as one rank sees them.
class MergeWords {
 public:
  MergeWords(const GatherCall& call, std::byte* data) : call_(call), data_(data) {}

  /// Called by the root: announces whether all ranks have mapped the segment.
  void start(bool is_well) noexcept {
    line(0).written.store(tagged(is_well ? started : given_up), std::memory_order_release);
    ring(line(0));
  }
  /// Called by the other ranks: waits for that announcement. Returns false if some rank has not mapped the segment.
  bool wait_for_start() {
    const Line& all = line(0);
    const int first = call_.first();
    await([&] { return is_there(all, Kind::written, started); }, [&]() -> const Line& { return all; },
          std::span(&first, 1), "merge: starting");
    return !has_given_up();
  }

  void give_up() noexcept {
    start(false);
    // Ranks that wait for this rank sleep on its own line.
    ring(line(1 + call_.position));
  }
  enum class Kind { written, reduced };
  void say(Kind kind, std::uint32_t chunks) noexcept {
    Line& mine = line(1 + call_.position);
    (kind == Kind::written ? mine.written : mine.reduced).store(tagged(chunks), std::memory_order_release);
    ring(mine);
  }
  /// Waits until all ranks of the list have written (or reduced) that many chunks. Returns false if a rank has given
  /// up.
  bool wait(Kind kind, std::uint32_t chunks) {
    std::size_t late = 0;  // the first position that was late at the last check
    const auto all_are_there = [&] {
      while (late < call_.list.size() && is_there(line(1 + late), kind, chunks)) ++late;
      return late == call_.list.size() || has_given_up();
    };
    await(
        all_are_there, [&]() -> const Line& { return line(1 + late); }, call_.list, "merge: reducing");
    return !has_given_up();
  }

 private:
  /// One cache line of the root for all ranks (`written` is its announcement), followed by one line per rank of the
  /// list.
  struct alignas(64) Line {
    std::atomic<std::uint64_t> written;
    std::atomic<std::uint64_t> reduced;
    std::atomic<std::uint32_t> bell;  // futex: changes with each other field of the line
  };
  static_assert(sizeof(Line) == line_bytes);
  static constexpr std::uint32_t started = 1;
  static constexpr std::uint32_t given_up = 2;

  [[nodiscard]] Line& line(std::size_t index) const noexcept {
    return *reinterpret_cast<Line*>(data_ + index * sizeof(Line));
  }
  [[nodiscard]] std::uint64_t tagged(std::uint32_t value) const noexcept { return call_.number << 32 | value; }
  [[nodiscard]] bool is_there(const Line& its, Kind kind, std::uint32_t chunks) const noexcept {
    const std::uint64_t word = (kind == Kind::written ? its.written : its.reduced).load(std::memory_order_acquire);
    return word >> 32 == (call_.number & UINT32_MAX) && static_cast<std::uint32_t>(word) >= chunks;
  }
  [[nodiscard]] bool has_given_up() const noexcept { return is_there(line(0), Kind::written, given_up); }
  static void ring(Line& its) noexcept {
    its.bell.fetch_add(1, std::memory_order_release);
    os::futex_wake_all(its.bell);
  }
  /// Waits until done(); sleeps on the bell of the line that late() returns.
  template <class Done, class Late>
  void await(const Done& done, const Late& late, std::span<const int> on, const char* phase) {
    call_.group->wait_until(
        done,
        [&](std::chrono::nanoseconds longest) {
          const Line& theirs = late();
          const std::uint32_t seen = theirs.bell.load(std::memory_order_acquire);
          if (!done()) os::futex_wait(theirs.bell, seen, longest);
        },
        on, call_.wait(phase));
  }

  const GatherCall& call_;
  std::byte* data_;
};

/// Runs steps 1 to 3 on one rank. `data`: the data of the segment; `source`: this rank's tensor. Returns early if a
/// rank has given up. Throws as Group::wait_until.
void reduce_in_chunks(const GatherCall& call, merge::Combine combine, const TensorView& source, const MergeArea& area,
                      std::byte* data) {
  MergeWords words(call, data);
  const std::size_t ranks = call.list.size();
  const std::size_t me = call.position;
  const auto chunks = static_cast<std::uint32_t>((area.target_bytes + area.chunk - 1) / area.chunk);
  const auto place = [&](std::uint32_t chunk, std::size_t rank) {
    return data + area.scratch_at + ((chunk % 2) * ranks + rank) * area.chunk;
  };
  const auto begin_of = [&](std::uint32_t chunk) { return chunk * area.chunk; };
  const auto bytes_of = [&](std::uint32_t chunk) { return std::min(area.chunk, area.target_bytes - begin_of(chunk)); };
  // Shares end at cache lines, so that no two ranks write into the same line.
  const auto share_begin = [&](std::uint32_t chunk, std::size_t rank) {
    const std::uint64_t lines = (bytes_of(chunk) + line_bytes - 1) / line_bytes;
    return std::min(lines * rank / ranks * line_bytes, bytes_of(chunk));
  };

  const auto write = [&](std::uint32_t chunk) {
    const std::uint64_t begin = begin_of(chunk);
    std::byte* mine = place(chunk, me);
    if (source.is_contiguous()) {
      // A rank's own share is read only by that rank, from its source. It is not copied.
      const std::byte* from = source.host_data() + begin;
      const std::uint64_t skip = share_begin(chunk, me);
      const std::uint64_t resume = share_begin(chunk, me + 1);
      std::memcpy(mine, from, skip);
      std::memcpy(mine + resume, from + resume, bytes_of(chunk) - resume);
    } else {
      merge::gapless(source, begin, begin + bytes_of(chunk), mine);
    }
    words.say(MergeWords::Kind::written, chunk + 1);
  };
  std::vector<const std::byte*> parts(ranks);
  const auto reduce = [&](std::uint32_t chunk) {
    const std::uint64_t begin = share_begin(chunk, me);
    const std::uint64_t end = share_begin(chunk, me + 1);
    for (std::size_t rank = 0; rank < ranks; ++rank) parts[rank] = place(chunk, rank) + begin;
    if (source.is_contiguous()) parts[me] = source.host_data() + begin_of(chunk) + begin;
    merge::reduce(combine, source.dtype(), {data + area.target_at + begin_of(chunk) + begin, end - begin}, parts);
    words.say(MergeWords::Kind::reduced, chunk + 1);
    call.group->progress();
  };

  for (std::uint32_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      if (chunk >= 2 && !words.wait(MergeWords::Kind::reduced, chunk - 1)) return;
      write(chunk);
    }
    if (chunk == 0) continue;
    if (!words.wait(MergeWords::Kind::written, chunk)) return;
    reduce(chunk - 1);
  }
}

class ShmMerge final : public Transfer {
 public:
  explicit ShmMerge(const GatherCall& call)
      : call_(call),
        state_(shm_state_of(*call.group)),
        source_(call.value->as_tensor().view()),
        lane_(call.first(), hash_list(call.list)) {
    state_->remotes.forget_retired();
  }

  ~ShmMerge() override {
    if (slot_) state_->pool.discard(lane_, slot_);
  }
  ShmMerge& operator=(ShmMerge&&) = delete;

  void offer(ExchangeRecord& record) override;
  void move(const Records& records, ExchangeReport& report) override;
  void commit() noexcept override {
    if (slot_) slot_->set_known();
  }
  std::vector<std::optional<Config>> deliver() override;
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return state_->pool.bytes(); }

 private:
  [[nodiscard]] shm::SenderPool::SlotLimits limits() const {
    return {call_.options->pipeline_depth, call_.options->memory_budget, call_.options->pool_limit,
            call_.group->info(call_.first()).global_rank};
  }
  void lay_out(const Records& records);
  void hand_out();
  void find(std::uint64_t place);
  void take_in();
  bool start();
  void copy_pieces();
  void copy_range(std::uint64_t begin, std::uint64_t end, const std::byte* from);
  void write_range(const merge::Rectangle& part, const std::byte* from);
  void populate(const merge::Rectangle& part);
  void populate(std::uint64_t begin, std::uint64_t end);

  const GatherCall& call_;
  std::shared_ptr<ShmState> state_;
  const TensorView& source_;
  shm::LaneId lane_;
  merge::Layout layout_;
  merge::Rows rows_;
  MergeArea area_;
  bool reduces_ = false;
  // Members of the root.
  shm::SlotPlan plan_;
  std::shared_ptr<shm::Slot> slot_;
  std::shared_ptr<const void> lease_;  // its destructor returns the slot
  // Members of the other ranks.
  std::shared_ptr<shm::RemoteSegment> remote_;
  std::byte* data_ = nullptr;  // data of the segment; null: no segment
  bool is_known_ = false;      // its memory has been written before
  bool writes_ = false;        // this rank writes with pwrite
};

void ShmMerge::offer(ExchangeRecord& record) {
  reduces_ = merge_reduces(merge_number(*call_.merge));
  offer_merge(*call_.merge, source_, record);
  record.moving_bytes = source_.nbytes();
  if (!call_.is_first()) return;
  // The sizes of the other ranks are not known yet; most often they equal this rank's size.
  const std::uint64_t ranks = call_.list.size();
  std::uint64_t target = source_.nbytes();
  // No machine has that much memory. The check of the records or the layout fails later.
  if (!reduces_ && (__builtin_mul_overflow(target, ranks, &target) || target > INT64_MAX / 4)) target = 0;
  const MergeArea expected = merge_area(reduces_, target, ranks);
  try {
    plan_ = state_->pool.plan(lane_, expected.total, limits());
  } catch (const Error&) {
    // The tensors of the other ranks may be smaller than this rank's. If not, the plan that is made after round 1
    // fails, and all ranks receive its error.
    plan_ = {};
  }
  record.held = state_->pool.held(lane_);
  if (plan_.slot) {
    record.segment = plan_.slot->segment().place();
    record.capacity = plan_.slot->segment().capacity();
    record.taken = plan_.slot->is_taken(0) ? plan_.slot->backed() : 0;
  }
  if (!plan_.slot || plan_.fresh_bytes != 0) {
    const os::MemoryHeadroom room = os::memory_headroom(group::Region::own()->backing());
    record.available_bytes = room.bytes;
    record.limit = room.limit;
  }
}

void ShmMerge::lay_out(const Records& records) {
  layout_ = gather::merge_layout(*call_.merge, {source_.dtype(), source_.shape()}, call_.list, records);
  rows_ = merge::rows_of(layout_);
  area_ = merge_area(reduces_, byte_size(layout_.target.dtype, layout_.target.shape), call_.list.size());
}

void ShmMerge::move(const Records& records, ExchangeReport&) {
  // A failure here fails the group: without a layout this rank does not know which ranks wait for it.
  group::unless_out_of_memory(*call_.group, [&] { lay_out(records); });
  if (area_.target_bytes == 0) return;
  const ExchangeRecord& first = records[static_cast<std::size_t>(call_.first())];
  is_known_ = is_warm(first, area_);
  if (is_known_)
    find(first.segment);
  else if (call_.is_first())
    hand_out();
  else
    take_in();
  if (data_ == nullptr) return;
  try {
    if (call_.is_first() && is_known_) slot_ = state_->pool.carry_out(lane_, std::move(plan_));
    if (slot_ && !lease_) {
      slot_->lend(nullptr);
      lease_ = {slot_.get(), [slot = slot_](const void*) { slot->withdraw(); }};
    }
    if (reduces_) {
      if (!is_known_ && !start()) return;
      populate(area_.scratch_at, area_.total);
      reduce_in_chunks(call_, layout_.combine, source_, area_, data_);
    } else {
      copy_pieces();
    }
  } catch (...) {
    if (reduces_) MergeWords(call_, data_).give_up();
    throw;
  }
  shm::publish_fence();
  // The root will read the whole result. It maps existing pages now, while other ranks still write.
  if (slot_ && is_known_) populate(0, area_.scratch_at);
}

void ShmMerge::hand_out() {
  std::exception_ptr failure;
  try {
    const bool is_enough = plan_.slot && plan_.slot->segment().capacity() >= area_.total;
    if (!is_enough || !plan_.slot->is_taken(area_.total)) plan_ = state_->pool.plan(lane_, area_.total, limits());
    const os::MemoryHeadroom room = os::memory_headroom(group::Region::own()->backing());
    if (plan_.fresh_bytes > room.bytes)
      throw Error(ErrorKind::out_of_space,
                  fmt::format("too little shared memory for the merged tensor: needed {}, available {} ({}). Merge "
                              "less at a time, release earlier results, or give the job more memory",
                              byte_text(plan_.fresh_bytes), byte_text(room.bytes), os::to_string(room.limit)));
    slot_ = state_->pool.carry_out(lane_, std::move(plan_));
    slot_->take(area_.total);
    data_ = slot_->segment().data();
  } catch (...) {
    failure = std::current_exception();
  }
  // All other ranks wait for a note, even if this rank has failed.
  for (const int rank : call_.list)
    if (rank != call_.first()) tell(call_, rank, failure ? 0 : slot_->segment().place(), handing_out);
  if (failure) std::rethrow_exception(failure);
}

void ShmMerge::find(std::uint64_t place) {
  if (call_.is_first()) {
    data_ = plan_.slot->segment().data();
    return;
  }
  remote_ = state_->remotes.known(call_.first(), place);
  if (remote_ && remote_->capacity() >= area_.total) {
    data_ = remote_->mapping().data();
    return;
  }
  // The ranks no longer agree about the segment, and some may already wait for this one.
  group::fail(*call_.group, Error(ErrorKind::corrupt,
                                  "malformed message: the root of a merge uses a segment that it has not announced"));
}

void ShmMerge::take_in() {
  try {
    const std::uint64_t place = hear(call_, call_.first(), handing_out);
    if (place == 0) return;
    remote_ = state_->remotes.at(*call_.group, call_.first(), place, os::Access::read_write);
    if (remote_->capacity() < area_.total)
      throw Error(ErrorKind::corrupt, "malformed message: the root names a segment that is too small");
    // The root may have freed the memory since the last use.
    remote_->populated().forget();
    data_ = remote_->mapping().data();
  } catch (...) {
    if (reduces_) tell(call_, call_.first(), 0, handing_out);
    throw;
  }
}

/// Step 4.
bool ShmMerge::start() {
  if (!call_.is_first()) {
    tell(call_, call_.first(), 1, handing_out);
    return MergeWords(call_, data_).wait_for_start();
  }
  bool all_are_well = true;
  for (const int rank : call_.list)
    if (rank != call_.first() && hear(call_, rank, handing_out) == 0) all_are_well = false;
  MergeWords(call_, data_).start(all_are_well);
  return all_are_well;
}

void ShmMerge::copy_pieces() {
  const std::uint64_t bytes = source_.nbytes();
  if (bytes == 0) return;
  writes_ = !is_known_ && std::min<int>(os::usable_cores(), static_cast<int>(call_.list.size())) <= writers_at_once;
  const bool is_strided = !source_.is_contiguous();
  const std::uint64_t at_once = is_strided ? staging_bytes : piece_bytes;
  std::vector<std::byte> staging(is_strided ? std::min(bytes, at_once) : 0);
  const std::uint64_t pieces = (bytes + at_once - 1) / at_once;
  // Each rank starts at a different piece. If rows interleave, no two ranks then fault in the same part at the same
  // time.
  const std::uint64_t shift = pieces * call_.position / call_.list.size();
  for (std::uint64_t i = 0; i < pieces; ++i) {
    const std::uint64_t begin = (i + shift) % pieces * at_once;
    const std::uint64_t end = std::min(begin + at_once, bytes);
    copy_range(begin, end, merge::gapless(source_, begin, end, staging.data()));
    call_.group->progress();
  }
}

/// Copies bytes [begin, end) of this rank's tensor, which start at `from`, to their places.
void ShmMerge::copy_range(std::uint64_t begin, std::uint64_t end, const std::byte* from) {
  std::byte* target = data_ + area_.target_at;
  for (const merge::Rectangle& part : merge::rectangles_of(rows_, static_cast<int>(call_.position), begin, end)) {
    if (writes_ && part.bytes >= written_from) {
      write_range(part, from);
      continue;
    }
    populate(part);
    shm::stream_rows(target + part.to, part.to_stride, from + part.from, part.from_stride, part.bytes, part.rows);
  }
}

void ShmMerge::write_range(const merge::Rectangle& part, const std::byte* from) {
  for (std::uint64_t row = 0; row < part.rows; ++row) {
    const std::uint64_t offset = area_.target_at + part.to + row * part.to_stride;
    const std::span bytes(from + part.from + row * part.from_stride, part.bytes);
    if (slot_)
      slot_->segment().write(offset, bytes);
    else
      remote_->write(offset, bytes);
  }
}

void ShmMerge::populate(const merge::Rectangle& part) {
  const std::uint64_t begin = area_.target_at + part.to;
  // For rows shorter than a page, every page has bytes of every rank, so the whole range is populated.
  if (part.rows == 1 || part.bytes < os::page_size())
    return populate(begin, begin + (part.rows - 1) * part.to_stride + part.bytes);
  // Most pages in the range belong to other ranks, and page faults for this rank's own pages occur only once.
  if (part.bytes < populated_from) return;
  for (std::uint64_t row = 0; row < part.rows; ++row)
    populate(begin + row * part.to_stride, begin + row * part.to_stride + part.bytes);
}

void ShmMerge::populate(std::uint64_t begin, std::uint64_t end) {
  if (slot_)
    slot_->populated().ensure(slot_->segment().mapping(), shm::header_bytes, begin, end);
  else
    remote_->populated().ensure(remote_->mapping(), 0, begin, end);
}

std::vector<std::optional<Config>> ShmMerge::deliver() {
  std::vector<std::optional<Config>> entries(1);
  const std::byte* data = data_ == nullptr ? nullptr : data_ + area_.target_at;
  entries.front() =
      Config(Tensor(TensorView(layout_.target.dtype, std::move(layout_.target.shape), data), std::move(lease_)));
  return entries;
}

}  // namespace

std::unique_ptr<Transfer> make_shm_merge(const GatherCall& call) {
  return std::make_unique<ShmMerge>(call);
}

}  // namespace muster::gather
