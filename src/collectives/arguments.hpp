// SPDX-License-Identifier: Apache-2.0
#pragma once
// Arguments of collectives: what ranks have to agree about, and what becomes of tensors before and after bytes move.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/process_group.hpp"
#include "muster/tensor.hpp"
#include "src/collectives/backend.hpp"

namespace muster::collectives {

merge::Combine combine_of(ReduceOp op);

/// What the ranks have to agree about.
struct What {
  const char* name;
  std::optional<ReduceOp> op = {};
  std::optional<int> root = {};
  DType dtype = DType::u8;
  const Shape* shape = nullptr;  // of Configs: none
  std::optional<std::size_t> dim = {};
  bool varies = false;  // the extent of that dimension may differ
  std::span<const std::int64_t> slices = {};

  [[nodiscard]] std::uint64_t hash() const;
  /// "all_reduce(sum) of F32 [4, 8]".
  [[nodiscard]] std::string words() const;
};

/// The dimension that a caller's number means.
std::size_t dimension(const Shape& shape, int dim);
/// How many rows a tensor has that is cut along `dim`: what is joined or cut there lies together in each.
std::uint64_t rows_before(const Shape& shape, std::size_t dim);
/// Elements of packed types share bytes: a row must not end within one.
void check_whole_bytes(DType dtype, const Shape& shape, std::size_t dim);
/// The extents of the slices of so many ranks: even ones, or `sizes`.
void cut(const Shape& shape, std::size_t dim, std::size_t ranks, std::optional<std::span<const std::int64_t>> sizes,
         std::vector<std::int64_t>& extents);
Shape with_extent(Shape shape, std::size_t dim, std::int64_t extent);
/// A result must be as `tensor` is, but for that extent.
void check_result(const Tensor& result, const TensorView& tensor, std::size_t dim, std::int64_t extent);
/// For calls that take no others. Throws Error(unsupported).
void check_on_host(const TensorView& tensor, const char* call);

// `device`: where the tensors of the call are; null: in host memory. Those that are elsewhere are refused.

/// The elements of a tensor that has no gaps.
Bytes bytes_of(const TensorView& tensor, const DeviceBackend* device = nullptr);
/// Of a result.
Room room_of(const Tensor& tensor, const DeviceBackend* device = nullptr);
/// A new result.
Tensor new_result(DType dtype, Shape shape, DeviceBackend* device = nullptr);
void check_same(const TensorView& tensor, const TensorView& other, const char* which);

/// The elements of a tensor without gaps: its own, or a copy. On a device there have to be none.
class Contiguous {
 public:
  Contiguous() = default;
  explicit Contiguous(const TensorView& tensor, const DeviceBackend* device = nullptr);
  /// Slices along a dimension, one behind the other.
  Contiguous(const TensorView& tensor, std::size_t dim, std::span<const std::int64_t> extents,
             DeviceBackend* device = nullptr);
  [[nodiscard]] Bytes bytes() const noexcept { return bytes_; }

 private:
  std::optional<Tensor> copy_;
  Bytes bytes_;
};

/// Copies parts, which lie one behind the other and have `rows` rows each, into `whole`, whose rows consist of the rows
/// of all parts.
void join_parts(const Tensor& parts, std::span<const std::uint64_t> sizes, std::uint64_t rows, const Tensor& whole);

}  // namespace muster::collectives
