// SPDX-License-Identifier: Apache-2.0
#pragma once
// What of MPI's datatypes and operations Muster has, and the caller's buffers as tensors.

#include <mpi.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "muster/process_group.hpp"

namespace muster::pmpi {

/// What a datatype's elements are for.
enum class Kind : std::uint8_t { bytes, numbers, truths };

struct Type {
  MPI_Datatype handle;
  DType dtype;
  Kind kind;
};

/// None: Muster has no such type.
const Type* type_of(MPI_Datatype handle) noexcept;

/// The reduction that gives the same results; none if there is no such one.
std::optional<ReduceOp> reduction_of(MPI_Op op, const Type* type) noexcept;

/// `count` elements at `data`.
class Elements {
 public:
  Elements(const void* data, std::int64_t count, MPI_Datatype type) noexcept
      : data_(data), count_(count), type_(type_of(type)) {}

  /// Whether a tensor can be made of them. What follows is for those.
  [[nodiscard]] bool is_plain() const noexcept {
    return type_ != nullptr && count_ >= 0 && (data_ != nullptr || count_ == 0);
  }
  [[nodiscard]] const std::byte* data() const noexcept { return static_cast<const std::byte*>(data_); }
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return is_plain() ? count_ * static_cast<std::int64_t>(itemsize(type_->dtype)) : -1;
  }
  /// As many elements further on, behind `times` times as many.
  [[nodiscard]] Elements behind(int times) const noexcept {
    Elements other = *this;
    if (bytes() > 0) other.data_ = data() + bytes() * times;
    return other;
  }
  /// So many times as many elements, from the same address on.
  [[nodiscard]] Elements times(int times) const noexcept {
    Elements all = *this;
    all.count_ *= times;
    return all;
  }
  /// As bytes: to be moved, whatever they are.
  [[nodiscard]] TensorView moved() const { return {DType::u8, {bytes()}, data_}; }
  /// As numbers: to be reduced.
  [[nodiscard]] TensorView reduced() const { return {type_->dtype, {count_}, data_}; }

 private:
  const void* data_;
  std::int64_t count_;
  const Type* type_;
};

/// The caller's memory, for results.
inline Tensor writable(const TensorView& view) {
  return {view, nullptr, const_cast<std::byte*>(view.data())};
}

inline void put(const Elements& to, const TensorView& from) noexcept {
  if (from.nbytes() != 0) std::memcpy(const_cast<std::byte*>(to.data()), from.data(), from.nbytes());
}

/// Whether both are the same memory, which MPI forbids.
inline bool is_one_buffer(const Elements& a, const Elements& b) noexcept {
  return a.data() == b.data() && a.bytes() > 0 && b.bytes() > 0;
}

/// A part of a buffer for each rank, in any order, with gaps.
class Parts {
 public:
  Parts(const void* base, const int* counts, const int* displacements, int ranks, MPI_Datatype type);

  [[nodiscard]] bool is_plain() const noexcept { return is_plain_; }
  [[nodiscard]] const std::vector<std::int64_t>& bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::int64_t all_bytes() const noexcept { return all_; }
  [[nodiscard]] Elements part(int rank) const noexcept;
  /// Leaves out a rank's.
  void drop(int rank) noexcept;
  /// One behind the other: where they are if they lie so, else a copy.
  [[nodiscard]] Tensor joined() const;
  /// Writes what lies one behind the other to the parts' places.
  void spread(const Tensor& joined) const noexcept;

 private:
  std::byte* base_;
  bool is_plain_;
  std::vector<std::int64_t> bytes_;
  std::vector<std::int64_t> begins_;
  std::int64_t all_ = 0;
};

}  // namespace muster::pmpi
