// SPDX-License-Identifier: Apache-2.0
#include "python/core/devices.hpp"

#include <fmt/core.h>

#include <string>
#include <utility>

#include "muster/error.hpp"
#include "muster/version.hpp"
#include "python/core/arrays.hpp"
#include "python/core/waiting.hpp"
#include "src/os/library.hpp"

namespace muster::python {

namespace {

/// Returns null and sets `library` if it cannot be loaded.
const cuda::Functions* find_functions(const std::string& name, os::LoadedLibrary& library) {
  // The GIL protects it.
  static const cuda::Functions* functions = nullptr;
  if (functions != nullptr) return functions;
  library = os::load_library(name);
  void* const symbol = library.handle == nullptr ? nullptr : os::find_symbol(library, cuda::functions_symbol);
  if (symbol != nullptr) functions = &reinterpret_cast<cuda::GetFunctions>(symbol)();
  return functions;
}

std::string library_name() {
  return fmt::format("libmuster-cuda.so.{}", version());
}

}  // namespace

void load_devices_if_installed() {
  static bool has_tried = false;
  if (std::exchange(has_tried, true)) return;
  os::LoadedLibrary library;
  (void)find_functions(library_name(), library);
}

const cuda::Functions& cuda_functions() {
  const std::string name = library_name();
  os::LoadedLibrary library;
  const cuda::Functions* const functions = find_functions(name, library);
  if (functions == nullptr)
    throw Error(
        ErrorKind::unsupported,
        fmt::format("tensors on GPUs need {}, which wheels do not contain. Install it next to libmuster, or copy "
                    "the tensors to the host first (.cpu()) ({})",
                    name, library.failure),
        {.path = library.file});
  return *functions;
}

CUstream_st* stream_of(nb::handle number) {
  if (number.is_none()) return nullptr;
  const auto stream = nb::cast<std::uintptr_t>(number);
  return stream <= 1 ? nullptr : reinterpret_cast<CUstream_st*>(stream);  // NOLINT(performance-no-int-to-ptr)
}

Tensor tensor_from_cuda_array_interface(nb::handle object) {
  const ArrayInterface told = array_interface_of(object, "__cuda_array_interface__");
  const nb::dict dict = nb::cast<nb::dict>(object.attr("__cuda_array_interface__"));
  if (dict.contains("mask") && !dict["mask"].is_none())
    throw Error(ErrorKind::invalid_argument, "__cuda_array_interface__ has a mask: pass the elements without it");
  const TensorView view = cuda_functions().view(told.dtype, told.shape, told.address, told.strides);
  const auto owner = owner_of(nb::borrow(object));
  if (const nb::object stream = dict.contains("stream") ? nb::object(dict["stream"]) : nb::none();
      !view.device().is_host())
    if (CUstream_st* const before = stream_of(stream)) cuda_functions().order(view.device().index, before, nullptr);
  if (told.is_read_only) return {view, owner};
  return {view, owner, static_cast<std::byte*>(told.address)};
}

nb::object to_cuda_array_interface(const Tensor& tensor) {
  const std::string type = typestr_of(tensor.dtype());
  if (tensor.device().is_host() || type.empty())
    throw nb::attribute_error(tensor.device().is_host()
                                  ? "the tensor is on the host: __cuda_array_interface__ is for GPUs"
                                  : "__cuda_array_interface__ has no such dtype: use DLPack, or view(\"U8\")");
  nb::list shape;
  nb::list strides;
  const Strides steps = full_strides(tensor.view());
  for (std::size_t i = 0; i < steps.size(); ++i) {
    shape.append(tensor.shape()[i]);
    strides.append(steps[i] * static_cast<std::int64_t>(itemsize(tensor.dtype())));
  }
  nb::dict dict;
  dict["shape"] = nb::tuple(shape);
  dict["typestr"] = type;
  dict["data"] = nb::make_tuple(reinterpret_cast<std::uintptr_t>(tensor.data()), !tensor.is_writable());
  dict["strides"] = tensor.view().is_contiguous() ? nb::none() : nb::object(nb::tuple(strides));
  dict["version"] = 3;
  dict["stream"] = 1;
  return dict;
}

}  // namespace muster::python
