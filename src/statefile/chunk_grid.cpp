// SPDX-License-Identifier: Apache-2.0
#include "src/statefile/chunk_grid.hpp"

#include <algorithm>

namespace muster::statefile {
namespace {

std::uint64_t item_bytes(DType dtype) noexcept {
  return is_packed(dtype) ? 1 : itemsize(dtype);
}

}  // namespace

std::vector<std::uint64_t> dataset_shape(DType dtype, const Shape& shape) {
  if (is_packed(dtype)) return {byte_size(dtype, shape)};
  return {shape.begin(), shape.end()};
}

ChunkGrid::ChunkGrid(std::vector<std::uint64_t> shape, std::size_t dim, std::uint64_t rows, std::uint64_t item)
    : shape_(std::move(shape)), dim_(dim), rows_(rows), row_bytes_(item) {
  // The whole tensor's bytes fit 63 bits, so none of these overflows.
  for (std::size_t d = dim + 1; d < shape_.size(); ++d) row_bytes_ *= shape_[d];
  for (std::size_t d = 0; d < dim; ++d) outer_ *= shape_[d];
  per_outer_ = (shape_[dim] - 1) / rows + 1;
}

ChunkGrid ChunkGrid::make(DType dtype, const Shape& shape, std::uint64_t chunk_bytes) {
  std::vector<std::uint64_t> extents = dataset_shape(dtype, shape);
  const std::uint64_t item = item_bytes(dtype);
  // The innermost dimension whose indices are small enough, then as far out as that holds.
  std::size_t dim = extents.size() - 1;
  std::uint64_t row = item;
  while (dim > 0 && row * extents[dim] <= chunk_bytes) row *= extents[dim--];
  std::uint64_t rows = std::clamp<std::uint64_t>(chunk_bytes / row, 1, extents[dim]);
  // Chunks of about the same size: the last one is not mostly padding.
  const std::uint64_t count = (extents[dim] - 1) / rows + 1;
  rows = (extents[dim] - 1) / count + 1;
  return {std::move(extents), dim, rows, item};
}

std::optional<ChunkGrid> ChunkGrid::of(DType dtype, const Shape& shape, std::size_t dim, std::uint64_t rows) {
  std::vector<std::uint64_t> extents = dataset_shape(dtype, shape);
  if (dim >= extents.size() || rows == 0 || rows > extents[dim]) return std::nullopt;
  if (std::ranges::find(extents, 0U) != extents.end()) return std::nullopt;
  ChunkGrid grid(std::move(extents), dim, rows, item_bytes(dtype));
  if (grid.row_bytes_ > largest_chunk || rows > largest_chunk / grid.row_bytes_) return std::nullopt;
  return grid;
}

std::uint64_t ChunkGrid::begin(std::uint64_t chunk) const noexcept {
  return ((chunk / per_outer_) * shape_[dim_] + (chunk % per_outer_) * rows_) * row_bytes_;
}

std::uint64_t ChunkGrid::bytes(std::uint64_t chunk) const noexcept {
  return std::min(rows_, shape_[dim_] - (chunk % per_outer_) * rows_) * row_bytes_;
}

std::uint64_t ChunkGrid::chunk_at(std::uint64_t offset) const noexcept {
  const std::uint64_t row = offset / row_bytes_;
  return row / shape_[dim_] * per_outer_ + row % shape_[dim_] / rows_;
}

std::vector<std::uint64_t> ChunkGrid::chunk_shape() const {
  std::vector<std::uint64_t> extents = shape_;
  std::fill(extents.begin(), extents.begin() + static_cast<std::ptrdiff_t>(dim_), 1);
  extents[dim_] = rows_;
  return extents;
}

}  // namespace muster::statefile
