// SPDX-License-Identifier: Apache-2.0
#pragma once
// DLPack 1.1: tensors as other libraries hand them over, in capsules.
// Source of the structures: dmlc/dlpack, include/dlpack/dlpack.h; of the calls: the Python array API standard.

#include <array>
#include <cstdint>
#include <optional>

#include "python/core/bindings.hpp"

namespace muster::python {

namespace dlpack {

struct Device {
  std::int32_t type;
  std::int32_t id;
};
struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t dims;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: row-major without gaps
  std::uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor* self);
};
struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};
struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned* self);
  std::uint64_t flags;
  Tensor tensor;
};
/// Of a type whose tensors need no capsules (DLPack 1.2): the first of its functions.
struct Exchange {
  Version version;
  Exchange* previous;
  void* allocate;
  int (*give)(void* object, ManagedTensorVersioned** out);  // -1: a Python exception is set
};
static_assert(sizeof(Tensor) == 48 && sizeof(ManagedTensor) == 64 && sizeof(ManagedTensorVersioned) == 80);

inline constexpr std::int32_t on_host = 1;
/// It, and what CUDA and ROCm have pinned.
inline constexpr std::array in_host_memory{on_host, 3, 11};
inline constexpr std::uint64_t read_only = 1;
inline constexpr std::uint64_t is_copied = 2;

}  // namespace dlpack

/// Throws Error(argument) if obj.__dlpack_device__() names another memory than the host's.
void check_on_host(nb::handle object);

/// What obj.__dlpack__() gives. Throws Error(argument) on tensors of devices, on dtypes without a name here, and on
/// capsules that have been used.
Tensor tensor_from_dlpack(nb::handle object);

/// The same without a capsule, some twenty times as fast, if the object's type has the C functions for that
/// (__dlpack_c_exchange_api__; PyTorch from 2.10 on) and what they say is all of the tensor. Throws as above.
std::optional<Tensor> tensor_from_exchange(nb::handle object);

/// A capsule of the tensor, which it keeps: of a read-only one without READ_ONLY's being asked for, of a copy.
/// Throws BufferError if that cannot be.
nb::object to_dlpack(const Tensor& tensor, const nb::object& max_version, const nb::object& dl_device,
                     std::optional<bool> copy);

}  // namespace muster::python
