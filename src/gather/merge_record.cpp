// SPDX-License-Identifier: Apache-2.0
#include "src/gather/merge_record.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "src/merge/layout.hpp"

namespace muster::gather {
namespace {

constexpr std::uint64_t page = 4096;
constexpr std::uint64_t line = 64;
// Large enough that ranks seldom wait for each other, and small enough that the data that all ranks reduce at a time
// stays in a large cache.
constexpr std::uint64_t largest_chunk = 2 << 20;
constexpr std::uint64_t smallest_chunk = 64 << 10;
constexpr std::uint64_t chunks_together = 8 << 20;

std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::string arguments(const Merge& merge, std::int64_t dim) {
  const auto* concat = std::get_if<merge::Concat>(&merge);
  if (concat == nullptr) return std::string(merge_name(merge));
  if (concat->blocks.empty()) return fmt::format("concat({})", dim);
  return fmt::format("concat_blocks({}, [{}])", dim, fmt::join(concat->blocks, ", "));
}

std::size_t dimension(const merge::Concat& concat, const Shape& shape) {
  return static_cast<std::size_t>(concat.dim < 0 ? concat.dim + static_cast<std::int64_t>(shape.size()) : concat.dim);
}

}  // namespace

std::string merge_text(const Merge& merge, const TensorSpec& spec) {
  const auto* concat = std::get_if<merge::Concat>(&merge);
  return fmt::format("{} {}", arguments(merge, concat == nullptr ? 0 : concat->dim), to_string(spec));
}

std::string merge_kind(const Merge& merge, const TensorSpec& spec) {
  const auto* concat = std::get_if<merge::Concat>(&merge);
  merge::join(merge, std::span(&spec, 1));
  if (concat == nullptr) return merge_text(merge, spec);
  // A dimension counted from the first or from the last one is the same dimension.
  const std::size_t dim = dimension(*concat, spec.shape);
  TensorSpec open = spec;
  open.shape[dim] = -1;
  return fmt::format("{} {}", arguments(merge, static_cast<std::int64_t>(dim)), to_string(open));
}

void offer_merge(const Merge& merge, const TensorView& own, ExchangeRecord& record) {
  record.merge = merge_number(merge);
  record.payload_bytes = own.nbytes();
  if (const auto* concat = std::get_if<merge::Concat>(&merge))
    record.extent = static_cast<std::uint64_t>(own.shape()[dimension(*concat, own.shape())]);
}

bool merge_moves(std::uint8_t number) noexcept {
  return number != 0 && number != merge_number(merge::Same{}) && number != merge_number(merge::First{});
}

bool merge_reduces(std::uint8_t number) noexcept {
  return number == merge_number(merge::Max{}) || number == merge_number(merge::Sum{});
}

merge::Layout merge_layout(const Merge& merge, const TensorSpec& own, std::span<const int> list,
                           const Records& records) {
  std::vector<TensorSpec> specs(list.size(), own);
  if (const auto* concat = std::get_if<merge::Concat>(&merge)) {
    const std::size_t dim = dimension(*concat, own.shape);
    for (std::size_t i = 0; i < specs.size(); ++i)
      specs[i].shape[dim] = static_cast<std::int64_t>(records[static_cast<std::size_t>(list[i])].extent);
  }
  return merge::join(merge, specs, {}, list);
}

MergeArea merge_area(bool reduces, std::uint64_t target_bytes, std::size_t ranks) noexcept {
  MergeArea area;
  area.target_at = round_up((ranks + 1) * line, page);
  area.target_bytes = target_bytes;
  area.scratch_at = area.target_at + round_up(target_bytes, page);
  area.total = area.scratch_at;
  if (reduces && target_bytes != 0) {
    const std::uint64_t share = std::clamp(chunks_together / ranks / page * page, smallest_chunk, largest_chunk);
    area.chunk = std::min(round_up(target_bytes, line), share);
    area.total += round_up(2 * ranks * area.chunk, page);
  }
  return area;
}

namespace {

/// Returns the area of the list `members`. `records` holds those of all members.
MergeArea merge_area_of(const std::vector<int>& members, const Records& records) {
  const auto record = [&](int rank) -> const ExchangeRecord& { return records[static_cast<std::size_t>(rank)]; };
  const ExchangeRecord& any = record(members.front());
  const bool reduces = merge_reduces(any.merge);
  std::uint64_t bytes = 0;
  for (const int rank : members)
    if (__builtin_add_overflow(bytes, record(rank).moving_bytes, &bytes)) bytes = UINT64_MAX / 4;
  if (reduces) bytes = any.moving_bytes;
  return merge_area(reduces, std::min(bytes, UINT64_MAX / 4), members.size());
}

}  // namespace

bool is_warm(const ExchangeRecord& first, const MergeArea& area) noexcept {
  return first.segment != 0 && first.taken >= area.total && first.capacity >= area.total;
}

std::uint64_t merge_fresh_bytes(int rank, const std::vector<int>& members, const Records& records) {
  const ExchangeRecord& own = records[static_cast<std::size_t>(rank)];
  if (own.operation != GatherKind::merge || own.position != 0 || !merge_moves(own.merge)) return own.fresh_bytes;
  if (own.available_bytes == 0) return 0;
  const MergeArea area = merge_area_of(members, records);
  const std::uint64_t taken = own.capacity >= area.total ? own.taken : 0;
  return area.total - std::min(area.total, taken);
}

std::vector<int> differing_contents(const std::vector<int>& members, const Records& records) {
  const auto record = [&](int rank) -> const ExchangeRecord& { return records[static_cast<std::size_t>(rank)]; };
  std::vector<int> others;
  if (record(members.front()).merge != merge_number(merge::Same{})) return others;
  const auto first = std::ranges::find_if(members, [&](int rank) { return record(rank).position == 0; });
  for (const int rank : members)
    if (record(rank).hash_low != record(*first).hash_low || record(rank).hash_high != record(*first).hash_high)
      others.push_back(rank);
  return others;
}

std::string content_text(const ExchangeRecord& record) {
  return fmt::format("(XXH3 {:016x}{:016x})", record.hash_high, record.hash_low);
}

}  // namespace muster::gather
