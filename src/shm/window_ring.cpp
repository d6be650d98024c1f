// SPDX-License-Identifier: Apache-2.0
#include "src/shm/window_ring.hpp"

#include <algorithm>
#include <array>

#include "muster/error.hpp"
#include "src/os/futex.hpp"
#include "src/os/pages.hpp"
#include "src/os/process.hpp"
#include "src/shm/stream_copy.hpp"

namespace muster::shm {
namespace {

constexpr std::uint64_t ring_header_bytes = 4096;
constexpr std::uint64_t ring_magic = 0x31474e49'5254534dULL;  // "MSTRING1"

void wait_for_word(const std::atomic<std::uint32_t>& word, const std::function<bool(std::uint32_t)>& is_good,
                   std::span<const int> on, Group& group, const WaitOptions& options) {
  std::uint32_t seen = 0;
  const auto done = [&] {
    seen = word.load(std::memory_order_acquire);
    return is_good(seen);
  };
  if (done()) return;
  group.wait_until(
      done, [&](std::chrono::nanoseconds longest) { os::futex_wait(word, seen, longest); }, on, options);
}

}  // namespace

struct WindowRing::Header {
  std::uint64_t magic;
  std::uint64_t window_bytes;
  std::uint32_t depth;
  std::atomic<std::uint32_t> users;     // processes that have mapped it or received its place
  std::atomic<std::uint32_t> released;  // released turns; futex
  std::atomic<std::uint32_t> stage;     // futex
  std::atomic<std::uint64_t> progress;
  std::array<std::atomic<std::uint32_t>, most_depth> arrived;  // one futex per window
};

WindowRing::WindowRing(std::uint32_t depth, std::uint64_t window_bytes, std::size_t others)
    : memory_(group::Region::own()->memory()),
      place_(group::Region::own()->take(ring_header_bytes + depth * window_bytes)),
      is_own_(true),
      pid_(os::process_id()),
      mapping_(*memory_, os::Access::read_write, place_, ring_header_bytes + depth * window_bytes),
      depth_(depth),
      window_bytes_(window_bytes) {
  static_assert(sizeof(Header) <= ring_header_bytes);
  os::reserve(*memory_, place_, mapping_.size());
  header().magic = ring_magic;
  header().window_bytes = window_bytes;
  header().depth = depth;
  header().users.store(static_cast<std::uint32_t>(others) + 1, std::memory_order_relaxed);
}

WindowRing::WindowRing(const group::Region& region, std::uint64_t place)
    : memory_(region.memory()), place_(place), is_own_(false), pid_(os::process_id()) {
  const std::uint64_t room = region.size() - std::min(place, region.size());
  if (room < ring_header_bytes || place % os::page_size() != 0)
    throw Error(ErrorKind::corrupt, "malformed message: it names an address outside the shared memory of its sender");
  mapping_ = os::Mapping(*memory_, os::Access::read_write, place, ring_header_bytes);
  depth_ = header().depth;
  // A ring without windows has no bytes for them, whatever its header says.
  window_bytes_ = depth_ == 0 ? 0 : header().window_bytes;
  if (header().magic != ring_magic || depth_ > most_depth ||
      (depth_ != 0 && window_bytes_ > (room - ring_header_bytes) / depth_))
    throw Error(ErrorKind::corrupt, "malformed message: it names buffers that its sender does not have");
  mapping_ = os::Mapping(*memory_, os::Access::read_write, place, ring_header_bytes + depth_ * window_bytes_);
}

WindowRing::~WindowRing() {
  if (os::process_id() != pid_) return;
  if (is_own_) os::punch_hole(*memory_, place_ + ring_header_bytes, depth_ * window_bytes_);
  if (header().users.fetch_sub(1, std::memory_order_acq_rel) == 1) os::punch_hole(*memory_, place_, mapping_.size());
}

WindowRing::Header& WindowRing::header() const noexcept {
  return *reinterpret_cast<Header*>(mapping_.data());
}

std::span<std::byte> WindowRing::window(std::uint32_t turn) const {
  return {mapping_.data() + ring_header_bytes + turn % depth_ * window_bytes_, window_bytes_};
}

void WindowRing::claim(std::uint32_t turn, int owner, Group& group, const WaitOptions& options) const {
  const auto is_free = [&](std::uint32_t released) {
    return static_cast<std::int32_t>(turn - released) < static_cast<std::int32_t>(depth_);
  };
  wait_for_word(header().released, is_free, std::span(&owner, owner == group.rank() ? 0 : 1), group, options);
}

void WindowRing::arrive(std::uint32_t turn) const noexcept {
  publish_fence();
  std::atomic<std::uint32_t>& arrived = header().arrived[turn % depth_];
  arrived.fetch_add(1, std::memory_order_acq_rel);
  os::futex_wake_all(arrived);
}

void WindowRing::wait_full(std::uint32_t turn, std::uint32_t contributors, std::span<const int> others, Group& group,
                           const WaitOptions& options) const {
  const auto is_full = [contributors](std::uint32_t arrived) { return arrived == contributors; };
  wait_for_word(header().arrived[turn % depth_], is_full, others, group, options);
}

void WindowRing::release(std::uint32_t turn) const noexcept {
  header().arrived[turn % depth_].store(0, std::memory_order_relaxed);
  header().released.store(turn + 1, std::memory_order_release);
  os::futex_wake_all(header().released);
}

void WindowRing::add_progress(std::uint64_t bytes) const noexcept {
  header().progress.fetch_add(bytes, std::memory_order_relaxed);
}

std::uint64_t WindowRing::progress() const noexcept {
  return header().progress.load(std::memory_order_relaxed);
}

void WindowRing::set_stage(std::uint32_t stage) const noexcept {
  header().stage.store(stage, std::memory_order_release);
  os::futex_wake_all(header().stage);
}

std::uint32_t WindowRing::stage() const noexcept {
  return header().stage.load(std::memory_order_acquire);
}

void WindowRing::wait_stage(std::uint32_t least, std::span<const int> on, Group& group,
                            const WaitOptions& options) const {
  wait_for_word(
      header().stage, [least](std::uint32_t stage) { return stage >= least; }, on, group, options);
}

std::vector<int> near_ranks(const Group& group) {
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank)
    if (rank != group.rank() && group.shares_memory(rank)) ranks.push_back(rank);
  return ranks;
}

std::vector<std::unique_ptr<WindowRing>> find_rings(group::BaseGroup& group, std::span<const int> near,
                                                    const WindowRing& own, const WaitOptions& options) {
  const std::uint64_t place = own.place();
  std::vector<std::uint64_t> places(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(&place, 1)), std::as_writable_bytes(std::span(places)), options);
  std::vector<std::unique_ptr<WindowRing>> rings(places.size());
  for (const int rank : near) {
    const auto at = static_cast<std::size_t>(rank);
    rings[at] = std::make_unique<WindowRing>(*group.region_of(rank), places[at]);
  }
  return rings;
}

}  // namespace muster::shm
