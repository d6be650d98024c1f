// SPDX-License-Identifier: Apache-2.0
#pragma once
// Conversions: MPI datatypes and operations that Muster has, and the caller's buffers as tensors.

#include <mpi.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "muster/process_group.hpp"

namespace muster::pmpi {

/// How the elements of a datatype may be used.
enum class Kind : std::uint8_t { bytes, numbers, truths };

struct Type {
  MPI_Datatype handle;
  DType dtype;
  Kind kind;
};

/// Returns null if Muster has no such type.
const Type* type_of(MPI_Datatype handle) noexcept;

/// Returns the reduction with the same results, or nullopt.
std::optional<ReduceOp> reduction_of(MPI_Op op, const Type* type) noexcept;

/// `count` elements at `data`.
class Elements {
 public:
  Elements(const void* data, std::int64_t count, MPI_Datatype type) noexcept
      : data_(data), count_(count), type_(type_of(type)) {}

  /// Returns whether a tensor can describe them. The other functions require that.
  [[nodiscard]] bool is_plain() const noexcept {
    return type_ != nullptr && count_ >= 0 && (data_ != nullptr || count_ == 0);
  }
  [[nodiscard]] const std::byte* data() const noexcept { return static_cast<const std::byte*>(data_); }
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return is_plain() ? count_ * static_cast<std::int64_t>(itemsize(type_->dtype)) : -1;
  }
  /// Returns as many elements at an offset of `times` times their size.
  [[nodiscard]] Elements behind(int times) const noexcept {
    Elements other = *this;
    if (bytes() > 0) other.data_ = data() + bytes() * times;
    return other;
  }
  /// Returns `times` times as many elements from the same address.
  [[nodiscard]] Elements times(int times) const noexcept {
    Elements all = *this;
    all.count_ *= times;
    return all;
  }
  /// The elements as bytes, to be moved, whatever their type.
  [[nodiscard]] TensorView moved() const { return {DType::u8, {bytes()}, data_}; }
  /// The elements as numbers, to be reduced.
  [[nodiscard]] TensorView reduced() const { return {type_->dtype, {count_}, data_}; }

 private:
  const void* data_;
  std::int64_t count_;
  const Type* type_;
};

/// The caller's memory as a tensor for results.
inline Tensor writable(const TensorView& view) {
  return {view, nullptr, const_cast<std::byte*>(view.data())};
}

inline void put(const Elements& to, const TensorView& from) noexcept {
  if (from.nbytes() != 0) std::memcpy(const_cast<std::byte*>(to.data()), from.data(), from.nbytes());
}

/// Returns whether both are the same memory, which MPI forbids.
inline bool is_one_buffer(const Elements& a, const Elements& b) noexcept {
  return a.data() == b.data() && a.bytes() > 0 && b.bytes() > 0;
}

/// One part of a buffer for each rank, in any order, with gaps.
class Parts {
 public:
  Parts(const void* base, const int* counts, const int* displacements, int ranks, MPI_Datatype type);

  [[nodiscard]] bool is_plain() const noexcept { return is_plain_; }
  [[nodiscard]] const std::vector<std::int64_t>& bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::int64_t all_bytes() const noexcept { return all_; }
  [[nodiscard]] Elements part(int rank) const noexcept;
  /// Removes the part of a rank.
  void drop(int rank) noexcept;
  /// Returns the parts in succession: in place if they are already contiguous, otherwise a copy.
  [[nodiscard]] Tensor joined() const;
  /// Writes contiguous parts to their places in the buffer.
  void spread(const Tensor& joined) const noexcept;

 private:
  std::byte* base_;
  bool is_plain_;
  std::vector<std::int64_t> bytes_;
  std::vector<std::int64_t> begins_;
  std::int64_t all_ = 0;
};

}  // namespace muster::pmpi
