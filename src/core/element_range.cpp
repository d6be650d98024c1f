// SPDX-License-Identifier: Apache-2.0
#include "src/core/element_range.hpp"

#include <algorithm>
#include <cstring>

namespace muster::core {

void copy_elements(const TensorView& source, std::int64_t begin, std::int64_t end, std::byte* target) {
  if (begin >= end) return;
  if (source.is_contiguous()) {
    const auto bits = static_cast<std::uint64_t>(muster::bits(source.dtype()));
    const std::uint64_t first = static_cast<std::uint64_t>(begin) * bits / 8;
    const std::uint64_t last =
        std::min<std::uint64_t>((static_cast<std::uint64_t>(end) * bits + 7) / 8, source.nbytes());
    std::memcpy(target, source.host_data() + first, last - first);
    return;
  }
  if (begin == 0 && end == source.elements()) return copy_contiguous(source, target);
  // The outermost dimension that there is anything to choose in: a part of one index, whole ones, a part of another.
  std::size_t dim = 0;
  while (source.shape()[dim] == 1) ++dim;
  const std::int64_t inner = source.elements() / source.shape()[dim];
  const auto item = static_cast<std::int64_t>(itemsize(source.dtype()));
  const auto part = [&](std::int64_t first, std::int64_t last, std::int64_t from, std::int64_t to) {
    copy_elements(source.slice(dim, first, last), from, to, target);
    target += (to - from) * item;
  };
  const std::int64_t first = begin / inner;
  const std::int64_t last = end / inner;
  const std::int64_t into_first = begin % inner;
  const std::int64_t into_last = end % inner;
  if (first == last) return part(first, first + 1, into_first, into_last);
  if (into_first != 0) part(first, first + 1, into_first, inner);
  const std::int64_t whole = into_first == 0 ? first : first + 1;
  if (whole < last) part(whole, last, 0, (last - whole) * inner);
  if (into_last != 0) part(last, last + 1, 0, into_last);
}

}  // namespace muster::core
