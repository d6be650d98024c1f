// SPDX-License-Identifier: Apache-2.0
#include "python/core/dlpack.hpp"
#include "python/core/devices.hpp"
#include "python/core/waiting.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "muster/error.hpp"

namespace muster::python {
namespace {

constexpr const char* name = "dltensor";
constexpr const char* versioned_name = "dltensor_versioned";
constexpr const char* exchange_name = "dlpack_exchange_api";

struct Named {
  DType dtype;
  std::uint8_t code;
  std::uint8_t bits;
};
// Version 1.1 added the codes from 10 on.
constexpr std::array table{
    Named{DType::boolean, 6, 8},      Named{DType::u8, 1, 8},         Named{DType::i8, 0, 8},
    Named{DType::u16, 1, 16},         Named{DType::i16, 0, 16},       Named{DType::u32, 1, 32},
    Named{DType::i32, 0, 32},         Named{DType::u64, 1, 64},       Named{DType::i64, 0, 64},
    Named{DType::f16, 2, 16},         Named{DType::bf16, 4, 16},      Named{DType::f32, 2, 32},
    Named{DType::f64, 2, 64},         Named{DType::f8_e4m3fn, 10, 8}, Named{DType::f8_e5m2, 12, 8},
    Named{DType::f8_e8m0, 14, 8},     Named{DType::f4_e2m1, 17, 4},   Named{DType::u4, 1, 4},
    Named{DType::i4, 0, 4},           Named{DType::complex64, 5, 64}, Named{DType::f8_e4m3fnuz, 11, 8},
    Named{DType::f8_e5m2fnuz, 13, 8}, Named{DType::f6_e2m3, 15, 6},   Named{DType::f6_e3m2, 16, 6},
};
constexpr std::uint8_t complex = 5;
constexpr std::uint8_t first_of_1_1 = 7;
constexpr std::uint64_t is_padded = 4;  // each packed element uses a whole byte

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::invalid_argument, "DLPack: " + words);
}
[[noreturn]] void refuse_device(int type) {
  refuse("the tensor is on a device (type " + std::to_string(type) + "): copy it to the host first (.cpu())");
}
[[noreturn]] void refuse_to_give(const char* words) {
  throw nb::buffer_error(words);
}

/// The tensor of a capsule and the arrays that it points to.
template <class Managed>
struct Given {
  Managed managed{};
  Tensor tensor;
  Shape shape;
  Strides strides;
};

dlpack::Device device_of(const Tensor& tensor) {
  if (tensor.device().is_host()) return {dlpack::on_host, 0};
  return {dlpack::on_cuda, tensor.device().index};
}

template <class Managed>
void fill(Given<Managed>& given, const Named& named) {
  dlpack::Tensor& out = given.managed.tensor;
  given.shape = given.tensor.shape();
  given.strides = given.tensor.view().strides();
  if (given.strides.empty()) {
    // Older consumers require strides.
    given.strides.resize(given.shape.size());
    std::int64_t step = 1;
    for (std::size_t i = given.shape.size(); i-- > 0; step *= std::max<std::int64_t>(given.shape[i], 1))
      given.strides[i] = step;
  }
  out.data = const_cast<std::byte*>(given.tensor.data());
  out.device = device_of(given.tensor);
  out.dims = static_cast<std::int32_t>(given.shape.size());
  out.dtype = {named.code, named.bits, 1};
  out.shape = given.shape.data();
  out.strides = given.strides.data();
  given.managed.context = &given;
  given.managed.deleter = [](Managed* self) { delete static_cast<Given<Managed>*>(self->context); };
}

/// The destructor of a capsule. It releases the content, unless a consumer has taken it and renamed the capsule.
template <class Managed>
void drop(PyObject* capsule) {
  constexpr bool is_versioned = std::is_same_v<Managed, dlpack::ManagedTensorVersioned>;
  const char* own = is_versioned ? versioned_name : name;
  if (PyCapsule_IsValid(capsule, own) == 0) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, own));
  managed->deleter(managed);
}

template <class Managed>
nb::object give(const Tensor& tensor, const Named& named, bool copied) {
  constexpr bool is_versioned = std::is_same_v<Managed, dlpack::ManagedTensorVersioned>;
  auto given = std::make_unique<Given<Managed>>();
  given->tensor = tensor;
  fill(*given, named);
  if constexpr (is_versioned) {
    given->managed.version = {1, 1};
    given->managed.flags = (tensor.is_writable() ? 0 : dlpack::read_only) | (copied ? dlpack::is_copied : 0);
  }
  auto capsule = nb::steal(PyCapsule_New(&given->managed, is_versioned ? versioned_name : name, drop<Managed>));
  if (!capsule.is_valid()) throw nb::python_error();
  (void)given.release();
  return capsule;
}

/// Returns the tensor of a managed tensor, and takes ownership of that.
template <class Managed>
Tensor take(Managed* managed, Devices devices) {
  const std::shared_ptr<const void> owner(managed, [](const void* kept) {
    if (Py_IsInitialized() == 0) return;
    const PyGILState_STATE state = ensured_gil();
    auto* self = static_cast<Managed*>(const_cast<void*>(kept));
    if (self->deleter != nullptr) self->deleter(self);
    PyGILState_Release(state);
  });
  const dlpack::Tensor& in = managed->tensor;
  const bool is_on_device = in.device.type == dlpack::on_cuda && devices == Devices::accepted;
  if (in.device.type != dlpack::on_host && !is_on_device && in.dtype.lanes == 1) refuse_device(in.device.type);
  std::uint64_t flags = 0;
  if constexpr (std::is_same_v<Managed, dlpack::ManagedTensorVersioned>) {
    if (managed->version.major != 1) refuse("version " + std::to_string(managed->version.major) + " is not known here");
    flags = managed->flags;
  }
  const auto named = std::find_if(table.begin(), table.end(), [&](const Named& each) {
    return each.code == in.dtype.code && each.bits == in.dtype.bits && in.dtype.lanes == 1;
  });
  if (named == table.end() || (in.dtype.bits < 8 && (flags & is_padded) != 0))
    refuse("there is no dtype here for code " + std::to_string(in.dtype.code) + ", " + std::to_string(in.dtype.bits) +
           " bits, " + std::to_string(in.dtype.lanes) + " lanes");
  Shape shape(in.shape, in.shape + in.dims);
  Strides strides;
  if (in.strides != nullptr && in.dtype.bits >= 8) strides.assign(in.strides, in.strides + in.dims);
  auto* data = static_cast<std::byte*>(in.data);
  if (data != nullptr) data += in.byte_offset;
  const TensorView view = is_on_device ? cuda_functions().view(named->dtype, std::move(shape), data, std::move(strides))
                                       : TensorView(named->dtype, std::move(shape), data, std::move(strides));
  if ((flags & dlpack::read_only) != 0) return {view, owner};
  return {view, owner, data};
}

/// Returns the tensor of a capsule that has not been consumed.
template <class Managed>
Tensor take(const nb::object& capsule, const char* own, const char* used, Devices devices) {
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), own));
  if (PyCapsule_SetName(capsule.ptr(), used) != 0) throw nb::python_error();
  return take(managed, devices);
}

/// Returns whether obj.__dlpack_device__() reports a GPU. Throws Error(invalid_argument) if it is another device, or no
/// device is accepted.
bool is_on_device(nb::handle object, Devices devices) {
  if (!nb::hasattr(object, "__dlpack_device__")) return false;
  const auto type = nb::cast<int>(object.attr("__dlpack_device__")()[0]);
  if (type == dlpack::on_cuda && devices == Devices::accepted) {
    (void)cuda_functions();  // without the library the capsule must not be taken
    return true;
  }
  if (std::ranges::find(dlpack::in_host_memory, type) == dlpack::in_host_memory.end()) refuse_device(type);
  return false;
}

nb::object capsule_of(nb::handle object, bool is_on_device) {
  nb::dict options;
  // The default stream, which exchanges follow. Without it, the producer may choose.
  if (is_on_device) options["stream"] = 1;
  const nb::object dlpack = object.attr("__dlpack__");
  try {
    return dlpack(nb::arg("max_version") = nb::make_tuple(1, 1), **options);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return dlpack(**options);
}

}  // namespace

bool is_on_device_by_dlpack(nb::handle object) {
  if (!nb::hasattr(object, "__dlpack_device__")) return false;
  const auto type = nb::cast<int>(object.attr("__dlpack_device__")()[0]);
  return std::ranges::find(dlpack::in_host_memory, type) == dlpack::in_host_memory.end();
}

Tensor tensor_from_dlpack(nb::handle object, Devices devices) {
  const nb::object capsule = capsule_of(object, is_on_device(object, devices));
  if (PyCapsule_IsValid(capsule.ptr(), versioned_name) != 0)
    return take<dlpack::ManagedTensorVersioned>(capsule, versioned_name, "used_dltensor_versioned", devices);
  if (PyCapsule_IsValid(capsule.ptr(), name) != 0)
    return take<dlpack::ManagedTensor>(capsule, name, "used_dltensor", devices);
  refuse("__dlpack__() gave no capsule that can be taken");
}

std::optional<Tensor> tensor_from_exchange(nb::handle object) {
  static const nb::handle attribute = nb::str("__dlpack_c_exchange_api__").release();
  // Only for the type itself: a subclass may keep its data elsewhere.
  const nb::object own = object.type().attr("__dict__");
  if (PySequence_Contains(own.ptr(), attribute.ptr()) != 1) return std::nullopt;
  const nb::object capsule = own[attribute];
  if (PyCapsule_IsValid(capsule.ptr(), exchange_name) == 0) return std::nullopt;
  const auto* table = static_cast<const dlpack::Exchange*>(PyCapsule_GetPointer(capsule.ptr(), exchange_name));
  if (table->version.major != 1) return std::nullopt;
  // PyTorch has views that represent the negative of their memory; the structure does not show it.
  if (const nb::object is_neg = nb::getattr(object, "is_neg", nb::none());
      !is_neg.is_none() && nb::cast<bool>(is_neg()))
    return std::nullopt;
  dlpack::ManagedTensorVersioned* managed = nullptr;
  if (table->give(object.ptr(), &managed) != 0) {
    PyErr_Clear();  // the slow path reports it in one line
    return std::nullopt;
  }
  // Complex tensors may represent their conjugates, and libraries disagree about new dtypes.
  // Tensors on devices need the stream protocol of the slow path.
  if (const std::uint8_t code = managed->tensor.dtype.code;
      code == complex || code >= first_of_1_1 || managed->tensor.device.type != dlpack::on_host) {
    if (managed->deleter != nullptr) managed->deleter(managed);
    return std::nullopt;
  }
  return take(managed, Devices::refused);
}

nb::object to_dlpack(const Tensor& tensor, nb::handle stream, const nb::object& max_version,
                     const nb::object& dl_device, std::optional<bool> copy) {
  const bool is_host = tensor.device().is_host();
  if (!dl_device.is_none() && nb::cast<int>(dl_device[0]) != device_of(tensor).type)
    refuse_to_give(is_host ? "a tensor in host memory can only be given to the host"
                           : "a tensor on a GPU can only be given to its GPU: use copy_to_host() first");
  int major = 0;
  int minor = 0;
  if (!max_version.is_none()) {
    major = nb::cast<int>(max_version[0]);
    minor = nb::cast<int>(max_version[1]);
  }
  const auto named =
      std::find_if(table.begin(), table.end(), [&](const Named& each) { return each.dtype == tensor.dtype(); });
  // PyTorch ignores READ_ONLY and writes, so a read-only tensor is exported as a copy.
  const bool needs_copy = copy.value_or(is_host && !tensor.is_writable() && tensor.nbytes() != 0);
  if (needs_copy && !is_host)
    refuse_to_give("a tensor on a GPU cannot be copied here: copy it with the library that reads it");
  if (copy == false && is_host && !tensor.is_writable() && tensor.nbytes() != 0)
    refuse_to_give("the tensor is read-only, and not all readers of DLPack look at that: it goes as a copy only");
  // A consumer that passes no version may still know the dtype (apache-tvm-ffi), or reports that it does not.
  if (named->code >= first_of_1_1 && major == 1 && minor == 0)
    refuse_to_give("this dtype needs DLPack 1.1, which the reader has not: use .view(\"U8\")");
  // The tensor is ready in the default stream. -1: the reader needs no order.
  if (!is_host && !stream.is_none() && nb::cast<std::intptr_t>(stream) != -1)
    if (CUstream_st* const after = stream_of(stream)) cuda_functions().order(tensor.device().index, nullptr, after);
  const Tensor given = needs_copy ? without_gil([&] { return Tensor::copy_of(tensor.view()); }) : tensor;
  if (major >= 1) return give<dlpack::ManagedTensorVersioned>(given, *named, needs_copy);
  return give<dlpack::ManagedTensor>(given, *named, needs_copy);
}

}  // namespace muster::python
