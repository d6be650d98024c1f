// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/merged_tensor.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "src/checkpoint/assembly_sources.hpp"
#include "src/core/quoted.hpp"
#include "src/merge/reduce.hpp"

namespace muster {
namespace {

std::vector<std::byte> part_of(const AssemblySource& source, std::uint64_t offset, std::uint64_t length) {
  std::vector<std::byte> bytes(length);
  source.read(offset, bytes);
  return bytes;
}

void copy(const MergedTensor& tensor, const merge::Rows& rows, std::uint64_t offset, std::span<std::byte> target) {
  std::memset(target.data(), 0, target.size());
  for (const merge::Rectangle& part : merge::rectangles(rows, offset, offset + target.size())) {
    if (part.rows == 0 || part.bytes == 0) continue;
    read_rows(tensor.sources[static_cast<std::size_t>(part.source)],
              {part.from, part.from_stride, part.to_stride, part.bytes, part.rows}, target.data() + part.to);
  }
}

void compare(const MergedTensor& tensor, std::uint64_t offset, std::uint64_t length) {
  const auto check = [&](std::size_t first, std::size_t other) {
    // Ranks of one part of a tensor have fewer bytes than the whole: their share of the window is compared. Where one
    // window ends the next begins, however that is rounded.
    const std::uint64_t size = tensor.sources[first].bytes;
    const std::uint64_t whole = byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
    const auto share = [&](std::uint64_t at) {
      if (at == whole) return size;
      const double part = static_cast<double>(at) / static_cast<double>(whole) * static_cast<double>(size);
      return std::min(static_cast<std::uint64_t>(part), size);
    };
    const std::uint64_t begin = share(offset);
    const std::uint64_t end = share(offset + length);
    if (begin == end) return;
    if (part_of(tensor.sources[first], begin, end - begin) == part_of(tensor.sources[other], begin, end - begin))
      return;
    throw Error(ErrorKind::rank_mismatch,
                fmt::format("the tensor {}: ranks {} and {} must have the same and have other values",
                            in_quotes(tensor.name), tensor.ranks[first], tensor.ranks[other]),
                {.rank = tensor.ranks[other]});
  };
  if (!tensor.layout.pieces.empty()) {
    const auto first = static_cast<std::size_t>(tensor.layout.pieces.front().source);
    for (const int other : tensor.layout.must_equal) check(first, static_cast<std::size_t>(other));
  }
  for (const auto& [first, other] : tensor.equal) check(first, other);
}

}  // namespace

void read_merged(const MergedTensor& tensor, const merge::Rows& rows, std::uint64_t offset,
                 std::span<std::byte> target) {
  compare(tensor, offset, target.size());
  if (target.empty()) return;
  if (tensor.layout.combine == merge::Combine::copy) return copy(tensor, rows, offset, target);
  // Max and sum: the same window of every source, and a piece a source in the order of ranks.
  std::vector<std::vector<std::byte>> parts;
  std::vector<const std::byte*> sources;
  for (const merge::Piece& piece : tensor.layout.pieces) {
    const AssemblySource& source = tensor.sources[static_cast<std::size_t>(piece.source)];
    // The vector may move, and its elements' memory stays.
    sources.push_back(parts.emplace_back(part_of(source, offset, target.size())).data());
  }
  merge::reduce(tensor.layout.combine, tensor.layout.target.dtype, target, sources);
}

}  // namespace muster
