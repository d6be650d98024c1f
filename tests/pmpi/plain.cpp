// SPDX-License-Identifier: Apache-2.0
#include "tests/pmpi/plain.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace muster::pmpi {

const Type* type_of(MPI_Datatype handle) noexcept {
  // The most common types first.
  static const std::array types{
      Type{MPI_DOUBLE, DType::f64, Kind::numbers},
      Type{MPI_FLOAT, DType::f32, Kind::numbers},
      Type{MPI_INT, dtype_of<int>, Kind::numbers},
      Type{MPI_BYTE, DType::u8, Kind::bytes},
      Type{MPI_CHAR, DType::u8, Kind::bytes},
      Type{MPI_LONG, dtype_of<long>, Kind::numbers},
      Type{MPI_UNSIGNED_LONG, dtype_of<unsigned long>, Kind::numbers},
      Type{MPI_LONG_LONG, dtype_of<long long>, Kind::numbers},
      Type{MPI_UNSIGNED_LONG_LONG, dtype_of<unsigned long long>, Kind::numbers},
      Type{MPI_UNSIGNED, dtype_of<unsigned>, Kind::numbers},
      Type{MPI_SHORT, dtype_of<short>, Kind::numbers},
      Type{MPI_UNSIGNED_SHORT, dtype_of<unsigned short>, Kind::numbers},
      Type{MPI_SIGNED_CHAR, dtype_of<signed char>, Kind::numbers},
      Type{MPI_UNSIGNED_CHAR, dtype_of<unsigned char>, Kind::numbers},
      Type{MPI_INT8_T, DType::i8, Kind::numbers},
      Type{MPI_INT16_T, DType::i16, Kind::numbers},
      Type{MPI_INT32_T, DType::i32, Kind::numbers},
      Type{MPI_INT64_T, DType::i64, Kind::numbers},
      Type{MPI_UINT8_T, DType::u8, Kind::numbers},
      Type{MPI_UINT16_T, DType::u16, Kind::numbers},
      Type{MPI_UINT32_T, DType::u32, Kind::numbers},
      Type{MPI_UINT64_T, DType::u64, Kind::numbers},
      Type{MPI_AINT, dtype_of<MPI_Aint>, Kind::numbers},
      Type{MPI_OFFSET, dtype_of<MPI_Offset>, Kind::numbers},
      Type{MPI_COUNT, dtype_of<MPI_Count>, Kind::numbers},
      Type{MPI_C_BOOL, DType::boolean, Kind::truths},
      Type{MPI_C_FLOAT_COMPLEX, DType::complex64, Kind::bytes},
  };
  const auto* const found = std::ranges::find(types, handle, &Type::handle);
  return found == types.end() ? nullptr : &*found;
}

std::optional<ReduceOp> reduction_of(MPI_Op op, const Type* type) noexcept {
  struct Reduction {
    MPI_Op handle;
    Kind kind;
    ReduceOp op;
  };
  static const std::array reductions{
      Reduction{MPI_SUM, Kind::numbers, ReduceOp::sum}, Reduction{MPI_PROD, Kind::numbers, ReduceOp::product},
      Reduction{MPI_MIN, Kind::numbers, ReduceOp::min}, Reduction{MPI_MAX, Kind::numbers, ReduceOp::max},
      Reduction{MPI_LAND, Kind::truths, ReduceOp::min}, Reduction{MPI_LOR, Kind::truths, ReduceOp::max},
  };
  if (type == nullptr) return std::nullopt;
  for (const Reduction& each : reductions)
    if (each.handle == op && each.kind == type->kind) return each.op;
  return std::nullopt;
}

Parts::Parts(const void* base, const int* counts, const int* displacements, int ranks, MPI_Datatype type)
    : base_(static_cast<std::byte*>(const_cast<void*>(base))) {
  const Type* const known = type_of(type);
  is_plain_ = known != nullptr && counts != nullptr && displacements != nullptr;
  if (!is_plain_) return;
  const auto size = static_cast<std::int64_t>(itemsize(known->dtype));
  for (int rank = 0; rank < ranks; ++rank) {
    is_plain_ = is_plain_ && counts[rank] >= 0;
    begins_.push_back(displacements[rank] * size);
    all_ += bytes_.emplace_back(counts[rank] * size);
  }
  is_plain_ = is_plain_ && (base != nullptr || all_ == 0);
}

Elements Parts::part(int rank) const noexcept {
  const auto at = static_cast<std::size_t>(rank);
  return {bytes_[at] == 0 ? base_ : base_ + begins_[at], bytes_[at], MPI_BYTE};
}

void Parts::drop(int rank) noexcept {
  all_ -= std::exchange(bytes_[static_cast<std::size_t>(rank)], 0);
}

Tensor Parts::joined() const {
  std::int64_t end = 0;
  bool lie_so = true;
  for (std::size_t rank = 0; rank < bytes_.size(); end += bytes_[rank++])
    lie_so = lie_so && (bytes_[rank] == 0 || begins_[rank] == end);
  if (lie_so) return Tensor::borrow({DType::u8, {all_}, base_});
  Tensor copy = Tensor::allocate(DType::u8, {all_});
  std::byte* to = copy.mutable_data();
  for (std::size_t rank = 0; rank < bytes_.size(); to += bytes_[rank++])
    if (bytes_[rank] != 0) std::memcpy(to, base_ + begins_[rank], static_cast<std::size_t>(bytes_[rank]));
  return copy;
}

void Parts::spread(const Tensor& joined) const noexcept {
  const std::byte* from = joined.data();
  for (std::size_t rank = 0; rank < bytes_.size(); from += bytes_[rank++])
    if (bytes_[rank] != 0) std::memcpy(base_ + begins_[rank], from, static_cast<std::size_t>(bytes_[rank]));
}

}  // namespace muster::pmpi
