// SPDX-License-Identifier: Apache-2.0
#pragma once
// DLPack 1.1: exchange of tensors with other libraries, in capsules.
// The structures are those of dmlc/dlpack, include/dlpack/dlpack.h. The calls are those of the Python array API
// standard.

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
/// The first functions of a type that exchanges tensors without capsules (DLPack 1.2).
struct Exchange {
  Version version;
  Exchange* previous;
  void* allocate;
  int (*give)(void* object, ManagedTensorVersioned** out);  // -1: a Python exception is set
};
static_assert(sizeof(Tensor) == 48 && sizeof(ManagedTensor) == 64 && sizeof(ManagedTensorVersioned) == 80);

inline constexpr std::int32_t on_host = 1;
inline constexpr std::int32_t on_cuda = 2;
/// Host memory, including memory pinned by CUDA and ROCm.
inline constexpr std::array in_host_memory{on_host, 3, 11};
inline constexpr std::uint64_t read_only = 1;
inline constexpr std::uint64_t is_copied = 2;

}  // namespace dlpack

/// Returns whether obj.__dlpack_device__() reports a device. False if the object has no such method.
bool is_on_device_by_dlpack(nb::handle object);
/// Returns the tensor of obj.__dlpack__(). Its GPU, if it is on one, makes the default stream wait for the work of the
/// producer. Throws Error(invalid_argument) if the tensor is on another device, or on a GPU without Devices::accepted,
/// if its dtype is unknown, or if the capsule has been consumed.
Tensor tensor_from_dlpack(nb::handle object, Devices devices);

/// Does the same without a capsule, about twenty times as fast. It returns nullopt unless the type of the object has
/// the C functions for that (__dlpack_c_exchange_api__; PyTorch from 2.10 on), they describe the tensor completely, and
/// it is on the host. Throws as above.
std::optional<Tensor> tensor_from_exchange(nb::handle object);

/// Returns a capsule that keeps the tensor alive. A read-only tensor on the host is exported as a copy. `stream` of the
/// GPU waits for the tensor. Throws BufferError if the export is impossible, such as that of a read-only tensor with
/// copy=False.
nb::object to_dlpack(const Tensor& tensor, nb::handle stream, const nb::object& max_version,
                     const nb::object& dl_device, std::optional<bool> copy);

}  // namespace muster::python
