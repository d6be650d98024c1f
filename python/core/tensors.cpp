// SPDX-License-Identifier: Apache-2.0
// muster.Tensor and muster.SharedArena.

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <utility>

#include "muster/error.hpp"
#include "muster/shared_arena.hpp"
#include "python/core/arrays.hpp"
#include "python/core/bindings.hpp"
#include "python/core/devices.hpp"
#include "python/core/dlpack.hpp"
#include "python/core/elements.hpp"
#include "python/core/waiting.hpp"

namespace muster::python {
namespace {

nb::object helper(const char* name) {
  return nb::module_::import_("muster._arrays").attr(name);
}

Ints tuple_of(const std::vector<std::int64_t>& numbers) {
  nb::list list;
  for (const std::int64_t number : numbers) list.append(number);
  return nb::tuple(list);
}

/// Returns the same memory as elements of another dtype.
Tensor seen_as(const Tensor& tensor, DType dtype, std::optional<Shape> shape) {
  const TensorView& view = tensor.view();
  Strides strides;
  if (!shape && itemsize(dtype) == itemsize(view.dtype()) && bits(dtype) == bits(view.dtype())) {
    shape = view.shape();
    strides = view.strides();
  }
  if (strides.empty() && !view.is_contiguous())
    throw Error(ErrorKind::invalid_argument, "view: the tensor is not contiguous: copy() it first");
  if (!shape) {
    shape = view.shape();
    if (shape->empty())
      throw Error(ErrorKind::invalid_argument, "view: a scalar has no dimension that could grow or shrink");
    shape->back() = shape->back() * bits(view.dtype()) / bits(dtype);
  }
  const TensorView seen(dtype, std::move(*shape), view.data(), std::move(strides), view.device());
  if (seen.nbytes() != view.nbytes())
    throw Error(ErrorKind::invalid_argument,
                fmt::format("view: {} has {} bytes, and {} has {}", to_string(TensorSpec{view.dtype(), view.shape()}),
                            view.nbytes(), to_string(TensorSpec{seen.dtype(), seen.shape()}), seen.nbytes()));
  if (!tensor.is_writable()) return {seen, tensor.owner()};
  return {seen, tensor.owner(), tensor.mutable_data()};
}

Tensor copied(const Tensor& tensor) {
  return without_gil([&] { return Tensor::copy_of(tensor.view()); });
}

bool is_of(nb::handle object, std::string_view package) {
  const nb::object module = nb::getattr(object.type(), "__module__", nb::none());
  if (!nb::isinstance<nb::str>(module)) return false;
  const char* text = nb::cast<nb::str>(module).c_str();
  return std::string_view(text) == package || std::string_view(text).starts_with(std::string(package) + ".");
}

/// Returns the dtype of a name in upper or lower case. Throws Error(invalid_argument) with the names of all dtypes.
DType dtype_named(std::string name) {
  std::ranges::transform(name, name.begin(),
                         [](unsigned char letter) { return static_cast<char>(std::toupper(letter)); });
  if (const auto dtype = dtype_from_string(name)) return *dtype;
  std::string all;
  for (const DType each : all_dtypes()) all += (all.empty() ? "" : ", ") + std::string(to_string(each));
  throw Error(ErrorKind::invalid_argument, fmt::format("'{}' is not a dtype (expected one of {})", name, all));
}

}  // namespace

Strides full_strides(const TensorView& view) {
  if (!view.is_contiguous()) return view.strides();
  Strides strides(view.shape().size());
  std::int64_t step = 1;
  for (std::size_t i = strides.size(); i-- > 0; step *= view.shape()[i]) strides[i] = step;
  return strides;
}

DType dtype_of(nb::handle dtype) {
  return converted([&] { return dtype_named(nb::cast<std::string>(helper("dtype_name")(dtype))); });
}

std::shared_ptr<const void> owner_of(nb::object object) {
  return {object.release().ptr(), [](const void* kept) {
            if (Py_IsInitialized() == 0) return;
            const PyGILState_STATE state = ensured_gil();
            Py_DECREF(static_cast<PyObject*>(const_cast<void*>(kept)));
            PyGILState_Release(state);
          }};
}

std::uint64_t bytes_of(nb::handle size) {
  return converted(
      [&] { return nb::cast<std::uint64_t>(nb::module_::import_("muster._units").attr("bytes_of")(size)); });
}

Tensor tensor_of(nb::handle object, Devices devices) {
  if (nb::isinstance<Tensor>(object)) return nb::cast<Tensor>(object);
  if (auto tensor = tensor_from_exchange(object)) return *std::move(tensor);
  // Subclasses of torch.Tensor (Parameter) may be defined in other modules, but have its attributes.
  if (is_of(object, "torch") || nb::hasattr(object, "requires_grad"))
    return nb::cast<Tensor>(helper("from_torch")(object, devices == Devices::accepted));
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    if (is_of(object, "numpy")) return nb::cast<Tensor>(helper("from_numpy")(object));
    // Arrays of CuPy and JAX have a buffer, which raises if their memory is that of a GPU.
    if (!nb::hasattr(object, "__cuda_array_interface__") && !is_on_device_by_dlpack(object))
      return tensor_from_buffer(object);
  }
  if (nb::hasattr(object, "__dlpack__")) return tensor_from_dlpack(object, devices);
  if (nb::hasattr(object, "__array_interface__")) return tensor_from_array_interface(object);
  if (nb::hasattr(object, "__cuda_array_interface__")) {
    if (devices == Devices::accepted) return tensor_from_cuda_array_interface(object);
    throw Error(ErrorKind::invalid_argument, "the tensor is on a GPU: copy it to the host first");
  }
  throw Error(ErrorKind::invalid_argument,
              fmt::format("{} is not a tensor: it supports neither DLPack nor the buffer protocol",
                          nb::type_name(object.type()).c_str()));
}

void bind_tensors(nb::module_& module) {
  nb::class_<Tensor>(module, "Tensor", nb::type_slots(buffer_slots),
                     R"(Elements of one dtype, in memory that the tensor keeps alive.

It is private memory, or that of another rank, of a file, or of the object that as_tensor() received. Gathered tensors
and tensors of files are read-only.)")
      .def_prop_ro(
          "dtype", [](const Tensor& self) { return std::string(to_string(self.dtype())); },
          "The safetensors name of the dtype: 'BF16', 'F8_E4M3', ... The names 'U4' and 'I4' are Muster extensions.")
      .def_prop_ro(
          "shape", [](const Tensor& self) { return tuple_of(self.shape()); }, "The extents of the dimensions.")
      .def_prop_ro(
          "strides", [](const Tensor& self) { return tuple_of(full_strides(self.view())); },
          "The strides of the dimensions, in elements.")
      .def_prop_ro(
          "ndim", [](const Tensor& self) { return self.shape().size(); }, "The number of dimensions.")
      .def_prop_ro(
          "size", [](const Tensor& self) { return self.view().element_count(); }, "The number of elements.")
      .def_prop_ro("nbytes", &Tensor::nbytes, "The size of a contiguous copy in bytes.")
      .def_prop_ro(
          "device", [](const Tensor& self) { return to_string(self.device()); },
          "The location of the elements: 'host', or the GPU, such as 'cuda:0'.")
      .def(
          "copy_to_host",
          [](const Tensor& self) {
            if (self.device().is_host()) return copied(self);
            const cuda::Functions& functions = cuda_functions();
            return without_gil([&] { return functions.copy_to_host(self); });
          },
          "Returns a contiguous writable copy on the host, of a tensor on the host or on a GPU.")
      .def_prop_ro("is_writable", &Tensor::is_writable, "Whether the elements may be changed.")
      .def_prop_ro(
          "is_contiguous", [](const Tensor& self) { return self.view().is_contiguous(); },
          "Whether the elements are in row-major order without gaps.")
      .def("copy", copied, "Returns a contiguous writable copy.")
      .def(
          "view",
          [](const Tensor& self, nb::handle dtype, std::optional<Shape> shape) {
            return seen_as(self, dtype_of(dtype), std::move(shape));
          },
          nb::arg("dtype").none(), nb::arg("shape") = nb::none(),
          R"(Returns the same memory as elements of another dtype.

Args:
    dtype: A name, or a dtype of NumPy, ml_dtypes or PyTorch.
    shape: The new shape. None: the extent of the last dimension is adapted.

Raises:
    InvalidArgumentError: The number of bytes differs, or the tensor is not contiguous.)")
      .def(
          "numpy", [](nb::handle self, nb::handle dtype) { return helper("to_numpy")(self, dtype); },
          nb::arg("dtype").none() = nb::none(),
          nb::sig("def numpy(self, dtype: muster._typing.DTypeLike | None = None) -> typing.Any"),
          R"(Returns a NumPy array of this memory, without a copy. It is read-only if the tensor is read-only.

BF16 and FP8 require ml_dtypes, unless `dtype` is given. Packed dtypes become one dimension of bytes.

Args:
    dtype: The dtype of the array. If it is another one than that of the tensor, the array is a copy with the values
        converted, one item per element.)")
      .def("item", item_of, nb::sig("def item(self) -> typing.Any"),
           "Returns the element of a tensor of one element, as an int, a float, a bool or a complex.")
      .def("tolist", list_of_elements, nb::sig("def tolist(self) -> typing.Any"),
           "Returns the elements as nested lists, or the element of a scalar.")
      .def(
          "__array__",
          [](nb::handle self, nb::handle dtype, nb::handle copy) { return helper("to_array")(self, dtype, copy); },
          nb::arg("dtype").none() = nb::none(), nb::arg("copy").none() = nb::none(),
          nb::sig("def __array__(self, dtype: typing.Any = None, copy: bool | None = None) -> typing.Any"))
      .def(
          "torch", [](nb::handle self, std::optional<bool> copy) { return helper("to_torch")(self, copy); },
          nb::arg("copy") = nb::none(), nb::sig("def torch(self, copy: bool | None = None) -> typing.Any"),
          R"(Returns a torch.Tensor of this memory if it is writable, otherwise of a copy. Packed dtypes become bytes.

Args:
    copy: True always copies. False raises an error if a copy is necessary.

Raises:
    BufferError: `copy` is False, and the tensor is read-only.)")
      .def(
          "__dlpack__",
          [](const Tensor& self, nb::handle stream, const nb::object& max_version, const nb::object& dl_device,
             std::optional<bool> copy) { return to_dlpack(self, stream, max_version, dl_device, copy); },
          nb::kw_only(), nb::arg("stream") = nb::none(), nb::arg("max_version") = nb::none(),
          nb::arg("dl_device") = nb::none(), nb::arg("copy") = nb::none())
      .def_prop_ro("__cuda_array_interface__", to_cuda_array_interface,
                   nb::sig("def __cuda_array_interface__(self) -> dict[str, typing.Any]"))
      .def(
          "__dlpack_device__",
          [](const Tensor& self) {
            return self.device().is_host() ? nb::make_tuple(dlpack::on_host, 0)
                                           : nb::make_tuple(dlpack::on_cuda, self.device().index);
          },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def(
          "__bool__",
          [](const Tensor& self) {
            if (self.view().element_count() == 1) return PyObject_IsTrue(item_of(self).ptr()) == 1;
            return self.shape().front() != 0;
          },
          "Returns whether the element of a tensor of one element is not zero. Any other tensor is true if it has "
          "rows, "
          "like a list, so that `result and ...` works.")
      .def("__getitem__", indexed, nb::arg("index").none(),
           nb::sig("def __getitem__(self, index: muster._typing.Index) -> Tensor"),
           R"(Returns the part that an int, a slice, Ellipsis or a tuple of these selects, in the same memory.

A part of a packed dtype must consist of whole bytes in one piece.)")
      .def(
          "__iter__", [](nb::handle self) { return helper("iterate")(self); },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[Tensor]"))
      .def(
          "__deepcopy__", [](const Tensor& self, nb::handle) { return copied(self); }, nb::arg("memo"),
          nb::sig("def __deepcopy__(self, memo: typing.Any) -> Tensor"))
      .def(
          "__reduce_ex__", [](nb::handle self, nb::handle protocol) { return helper("reduced")(self, protocol); },
          nb::arg("protocol"),
          nb::sig("def __reduce_ex__(self, protocol: typing.SupportsIndex) -> tuple[typing.Any, ...]"))
      .def("__bytes__",
           [](const Tensor& self) {
             const Tensor whole =
                 self.view().is_contiguous() ? self : without_gil([&] { return Tensor::copy_of(self.view()); });
             return nb::bytes(whole.view().host_data(), whole.nbytes());
           })
      .def("__len__",
           [](const Tensor& self) {
             if (self.shape().empty()) throw nb::type_error("a tensor without dimensions has no length");
             return self.shape().front();
           })
      .def("__repr__", [](const Tensor& self) {
        return fmt::format("muster.Tensor({}{}{})", to_string(TensorSpec{self.dtype(), self.shape()}),
                           self.device().is_host() ? "" : ", " + to_string(self.device()),
                           self.is_writable() ? "" : ", read-only");
      });
  module.def("bitwise_equal", [](nb::handle a, nb::handle b) {
    const Tensor first = tensor_of(a);
    const Tensor second = tensor_of(b);
    return without_gil([&] { return bitwise_equal(first, second); });
  });
  module.def(
      "as_tensor",
      [](nb::handle object, nb::handle dtype, std::optional<Shape> shape) {
        Tensor tensor = tensor_of(object, Devices::accepted);
        if (dtype.is_none() && !shape) return tensor;
        return seen_as(tensor, dtype.is_none() ? tensor.dtype() : dtype_of(dtype), std::move(shape));
      },
      nb::arg("object").none(), nb::arg("dtype").none() = nb::none(), nb::arg("shape") = nb::none());
  module.def("widened", widened);
  module.def("from_buffer", [](nb::handle object) { return tensor_from_buffer(object); });
  module.def("from_dlpack", [](nb::handle object) { return tensor_from_dlpack(object, Devices::accepted); });
  module.def(
      "empty",
      [](nb::handle dtype, Shape shape) {
        const DType made = dtype_of(dtype);
        return without_gil([&] { return Tensor::allocate(made, std::move(shape)); });
      },
      nb::arg().none(), nb::arg());

  nb::class_<SharedArena>(module, "SharedArena",
                          R"(Shared memory for tensors: a gather on one host then transfers only references.

Do not write to tensors of it while the root holds the result of a gather.

Args:
    capacity: The size in bytes, or as text such as '64MiB'.

Raises:
    InvalidArgumentError: The capacity is not a size.
    OutOfSpaceError: Memory is insufficient.
    UnsupportedError: This machine has no anonymous shared memory.)")
      .def(
          "__init__",
          [](SharedArena* self, nb::handle capacity) {
            const std::uint64_t bytes = bytes_of(capacity);
            without_gil([&] { new (self) SharedArena(bytes); });
          },
          nb::arg("capacity"))
      .def(
          "allocate",
          [](SharedArena& self, nb::handle dtype, Shape shape) {
            const DType made = dtype_of(dtype);
            return without_gil([&] { return self.allocate(made, std::move(shape)); });
          },
          nb::arg("dtype").none(), nb::arg("shape"),
          R"(Returns a writable, uninitialized tensor in the arena, which keeps the memory of the arena alive.

Args:
    dtype: A name, or a dtype of NumPy, ml_dtypes or PyTorch.
    shape: The extents of the dimensions.

Raises:
    InvalidArgumentError: The dtype or the shape is invalid.
    OutOfSpaceError: The arena has not enough free memory.)")
      .def_prop_ro("capacity", &SharedArena::capacity, "The capacity in bytes.")
      .def_prop_ro("available", &SharedArena::available, "The bytes that can be allocated now.")
      .def_prop_ro("waiting_for_leases", &SharedArena::waiting_for_leases,
                   "The bytes that their owner has freed and that a root still holds.");
}

}  // namespace muster::python
