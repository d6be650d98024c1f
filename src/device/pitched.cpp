// SPDX-License-Identifier: Apache-2.0
#include "src/device/pitched.hpp"

#include <fmt/core.h>

#include "muster/error.hpp"

namespace muster::cuda {

std::optional<Pitched> pitched(const TensorView& view) {
  const std::uint64_t bytes = view.nbytes();
  if (view.is_contiguous()) return Pitched{bytes, 1, bytes};
  // From the innermost dimension out: first what lies side by side, then steps of one length.
  const auto item = static_cast<std::int64_t>(itemsize(view.dtype()));
  std::int64_t width = item;
  std::int64_t rows = 1;
  std::int64_t pitch = 0;
  for (std::size_t dim = view.shape().size(); dim-- > 0;) {
    const std::int64_t extent = view.shape()[dim];
    const std::int64_t step = view.strides()[dim] * item;
    if (extent == 1) continue;
    if (rows == 1 && step == width) {
      width *= extent;
    } else if (rows == 1 && step > width) {
      rows = extent;
      pitch = step;
    } else if (rows > 1 && step == pitch * rows) {
      rows *= extent;
    } else {
      return std::nullopt;
    }
  }
  if (rows == 1) pitch = width;
  return Pitched{static_cast<std::uint64_t>(width), static_cast<std::uint64_t>(rows),
                 static_cast<std::uint64_t>(pitch)};
}

Pitched require_pitched(const TensorView& view) {
  if (const auto layout = pitched(view)) return *layout;
  throw Error(ErrorKind::argument,
              fmt::format("a tensor of shape {} on {} has strides that a device cannot copy in one go: make it "
                          "contiguous there first",
                          to_string(view.shape()), to_string(view.device())));
}

}  // namespace muster::cuda
