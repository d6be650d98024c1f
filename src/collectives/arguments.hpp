// SPDX-License-Identifier: Apache-2.0
#pragma once
// The arguments of collectives: the properties on which ranks must agree, and how tensors are converted before and
// after the transfer of bytes.

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

/// The properties of a call on which all ranks must agree.
struct What {
  const char* name;
  std::optional<ReduceOp> op = {};
  std::optional<int> root = {};
  DType dtype = DType::u8;
  const Shape* shape = nullptr;  // null for calls with Configs
  std::optional<std::size_t> dim = {};
  bool varies = false;  // the extent of that dimension may differ between ranks
  std::span<const std::int64_t> slices = {};

  [[nodiscard]] std::uint64_t hash() const;
  /// Returns a description of the call: "all_reduce(sum) of F32 [4, 8]".
  [[nodiscard]] std::string words() const;
};

/// Converts the `dim` argument of a caller to the index of a dimension.
std::size_t dimension(const Shape& shape, int dim);
/// Returns the number of rows of a tensor that is cut along `dim`. The data that is joined or cut there is contiguous
/// in each row.
std::uint64_t rows_before(const Shape& shape, std::size_t dim);
/// Elements of packed types share bytes. Throws if a row would end within a byte.
void check_whole_bytes(DType dtype, const Shape& shape, std::size_t dim);
/// Sets the extents of the slices for that many ranks: even ones, or `sizes`.
void cut(const Shape& shape, std::size_t dim, std::size_t ranks, std::optional<std::span<const std::int64_t>> sizes,
         std::vector<std::int64_t>& extents);
Shape with_extent(Shape shape, std::size_t dim, std::int64_t extent);
/// Checks that a result has the type and shape of `tensor`, except for the extent of dimension `dim`.
void check_result(const Tensor& result, const TensorView& tensor, std::size_t dim, std::int64_t extent);
/// For calls that accept only host memory. Throws Error(unsupported).
void check_on_host(const TensorView& tensor, const char* call);

// `device` is the backend of the device that holds the tensors of the call; null means host memory. Tensors elsewhere
// are rejected.

/// Returns the bytes of a contiguous tensor.
Bytes bytes_of(const TensorView& tensor, const DeviceBackend* device = nullptr);
/// Returns the bytes of a result.
Room room_of(const Tensor& tensor, const DeviceBackend* device = nullptr);
/// Allocates a new result.
Tensor new_result(DType dtype, Shape shape, DeviceBackend* device = nullptr);
void check_same(const TensorView& tensor, const TensorView& other, const char* which);

/// The elements of a tensor as contiguous bytes: its own memory, or a copy. A tensor on a device must be contiguous.
class Contiguous {
 public:
  Contiguous() = default;
  explicit Contiguous(const TensorView& tensor, const DeviceBackend* device = nullptr);
  /// Copies slices along a dimension, one after another.
  Contiguous(const TensorView& tensor, std::size_t dim, std::span<const std::int64_t> extents,
             DeviceBackend* device = nullptr);
  [[nodiscard]] Bytes bytes() const noexcept { return bytes_; }

 private:
  std::optional<Tensor> copy_;
  Bytes bytes_;
};

/// Joins parts into `whole`. The parts are stored one after another and have `rows` rows each. A row of `whole`
/// consists of the rows of all parts.
void join_parts(const Tensor& parts, std::span<const std::uint64_t> sizes, std::uint64_t rows, const Tensor& whole);

}  // namespace muster::collectives
