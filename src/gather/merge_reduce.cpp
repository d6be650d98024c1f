// SPDX-License-Identifier: Apache-2.0
#include "src/gather/merge_reduce.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "src/merge/reduce.hpp"
#include "src/os/futex.hpp"

namespace muster::gather {
namespace {

constexpr std::uint64_t line_bytes = 64;
constexpr std::uint32_t started = 1;
constexpr std::uint32_t given_up = 2;

}  // namespace

/// One of the first rank's for all (`written` says how it stands), then one a rank of the list.
struct alignas(64) MergeWords::Line {
  std::atomic<std::uint64_t> written;
  std::atomic<std::uint64_t> reduced;
  std::atomic<std::uint32_t> bell;  // futex: changed with every other word of the line
};

MergeWords::Line& MergeWords::line(std::size_t index) const noexcept {
  static_assert(sizeof(Line) == line_bytes);
  return *reinterpret_cast<Line*>(data_ + index * sizeof(Line));
}

std::uint64_t MergeWords::tagged(std::uint32_t value) const noexcept {
  return call_.number << 32 | value;
}

bool MergeWords::is_there(const Line& line, Kind kind, std::uint32_t chunks) const noexcept {
  const std::uint64_t word = (kind == Kind::written ? line.written : line.reduced).load(std::memory_order_acquire);
  return word >> 32 == (call_.number & UINT32_MAX) && static_cast<std::uint32_t>(word) >= chunks;
}

void MergeWords::ring(Line& line) noexcept {
  line.bell.fetch_add(1, std::memory_order_release);
  os::futex_wake_all(line.bell);
}

void MergeWords::start(bool is_well) noexcept {
  line(0).written.store(tagged(is_well ? started : given_up), std::memory_order_release);
  ring(line(0));
}

bool MergeWords::wait_for_start() {
  const Line& all = line(0);
  const auto has_started = [&] { return is_there(all, Kind::written, started); };
  const int first = call_.first();
  call_.group->wait_until(
      has_started,
      [&](std::chrono::nanoseconds longest) {
        const std::uint32_t seen = all.bell.load(std::memory_order_acquire);
        if (!has_started()) os::futex_wait(all.bell, seen, longest);
      },
      std::span(&first, 1), call_.wait("merge: starting"));
  return !has_given_up();
}

void MergeWords::give_up() noexcept {
  start(false);
  // Whoever waits for this rank sleeps on its own line.
  ring(line(1 + call_.position));
}

bool MergeWords::has_given_up() const noexcept {
  return is_there(line(0), Kind::written, given_up);
}

void MergeWords::say(Kind kind, std::uint32_t chunks) noexcept {
  Line& mine = line(1 + call_.position);
  (kind == Kind::written ? mine.written : mine.reduced).store(tagged(chunks), std::memory_order_release);
  ring(mine);
}

bool MergeWords::wait(Kind kind, std::uint32_t chunks) {
  std::size_t late = 0;  // the first position that was not there when last looked at
  const auto all_are_there = [&] {
    while (late < call_.list.size() && is_there(line(1 + late), kind, chunks)) ++late;
    return late == call_.list.size() || has_given_up();
  };
  call_.group->wait_until(
      all_are_there,
      [&](std::chrono::nanoseconds longest) {
        const Line& theirs = line(1 + late);
        const std::uint32_t seen = theirs.bell.load(std::memory_order_acquire);
        if (!all_are_there()) os::futex_wait(theirs.bell, seen, longest);
      },
      call_.list, call_.wait("merge: reducing"));
  return !has_given_up();
}

void reduce_in_chunks(const Call& call, merge::Combine combine, const TensorView& source, const MergeArea& area,
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
  // Shares end at cache lines, so that no two ranks write into one.
  const auto share_begin = [&](std::uint32_t chunk, std::size_t rank) {
    const std::uint64_t lines = (bytes_of(chunk) + line_bytes - 1) / line_bytes;
    return std::min(lines * rank / ranks * line_bytes, bytes_of(chunk));
  };

  const auto write = [&](std::uint32_t chunk) {
    const std::uint64_t begin = begin_of(chunk);
    std::byte* mine = place(chunk, me);
    if (source.is_contiguous()) {
      // What only this rank reads, its own share, stays where it is.
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

}  // namespace muster::gather
