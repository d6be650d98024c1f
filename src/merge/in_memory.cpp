// SPDX-License-Identifier: Apache-2.0
#include "src/merge/in_memory.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "src/core/parallel.hpp"
#include "src/merge/reduce.hpp"
#include "src/merge/rows.hpp"

namespace muster::merge {
namespace {

constexpr std::uint64_t piece_bytes = 4 << 20;  // for one thread, between two signs of progress

void copy_window(const Rows& rows, std::uint64_t begin, std::uint64_t end, std::span<const TensorView> sources,
                 std::byte* target) {
  for (const Rectangle& part : rectangles(rows, begin, end)) {
    const std::byte* from = sources[static_cast<std::size_t>(part.source)].bytes().data() + part.from;
    std::byte* to = target + begin + part.to;
    for (std::uint64_t row = 0; row < part.rows; ++row)
      std::memcpy(to + row * part.to_stride, from + row * part.from_stride, part.bytes);
  }
}

}  // namespace

Tensor merge_in_memory(const Merge& merge, std::span<const TensorView> sources, std::span<const int> ranks,
                       const std::function<void()>& progress) {
  std::vector<TensorSpec> specs;
  std::vector<Tensor> copies;  // of strided ones
  std::vector<TensorView> plain;
  for (const TensorView& source : sources) {
    specs.push_back({source.dtype(), source.shape()});
    if (!source.is_contiguous()) copies.push_back(Tensor::copy_of(source));
    plain.push_back(source.is_contiguous() ? source : copies.back().view());
  }
  const Layout layout = join(merge, specs, {}, ranks);
  if (layout.combine != Combine::copy) check_reducible(layout.combine, layout.target.dtype);
  const Rows rows = rows_of(layout);
  Tensor result = Tensor::allocate(layout.target.dtype, layout.target.shape);
  std::byte* target = result.mutable_data();
  const std::uint64_t bytes = result.nbytes();
  if (rows.has_gaps) std::memset(target, 0, bytes);
  const std::size_t pieces = (bytes + piece_bytes - 1) / piece_bytes;
  parallel_for(pieces, copy_workers(), [&](std::size_t piece, std::size_t) {
    const std::uint64_t begin = piece * piece_bytes;
    const std::uint64_t end = std::min(bytes, begin + piece_bytes);
    if (layout.combine == Combine::copy) {
      copy_window(rows, begin, end, plain, target);
    } else {
      std::vector<const std::byte*> parts;
      for (const TensorView& source : plain) parts.push_back(source.bytes().data() + begin);
      reduce(layout.combine, layout.target.dtype, {target + begin, end - begin}, parts);
    }
    progress();
  });
  return result;
}

}  // namespace muster::merge
