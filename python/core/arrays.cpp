// SPDX-License-Identifier: Apache-2.0
#include "python/core/arrays.hpp"
#include "python/core/waiting.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "muster/error.hpp"

namespace muster::python {
namespace {

static_assert(std::endian::native == std::endian::little);

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::invalid_argument, words);
}

/// Returns the dtype of a NumPy kind and an item size. `kind`: b(ool), i, u, f, c, as in __array_interface__.
std::optional<DType> dtype_of_kind(char kind, std::int64_t bytes) {
  for (const DType each : {DType::boolean, DType::u8, DType::i8, DType::u16, DType::i16, DType::u32, DType::i32,
                           DType::u64, DType::i64, DType::f16, DType::f32, DType::f64, DType::complex64}) {
    const std::string_view name = to_string(each);
    const char own = name.front() == 'B'   ? 'b'
                     : name.front() == 'C' ? 'c'
                     : name.front() == 'F' ? 'f'
                     : name.front() == 'U' ? 'u'
                                           : 'i';
    if (own == kind && static_cast<std::int64_t>(itemsize(each)) == bytes) return each;
  }
  return std::nullopt;
}

/// Returns the dtype of a format of the struct module.
std::optional<DType> dtype_of_format(std::string_view format, std::int64_t bytes) {
  if (!format.empty() && (format.front() == '>' || format.front() == '!')) {
    if (bytes != 1) return std::nullopt;
    format.remove_prefix(1);
  } else if (!format.empty() && (format.front() == '@' || format.front() == '=' || format.front() == '<')) {
    format.remove_prefix(1);
  }
  if (format == "Zf") return dtype_of_kind('c', bytes);
  if (format.size() != 1) return std::nullopt;
  const char letter = format.front();
  if (letter == '?') return dtype_of_kind('b', bytes);
  if (letter == 'c' || std::string_view("BHILQN").find(letter) != std::string_view::npos)
    return dtype_of_kind('u', bytes);
  if (std::string_view("bhilqn").find(letter) != std::string_view::npos) return dtype_of_kind('i', bytes);
  if (std::string_view("efd").find(letter) != std::string_view::npos) return dtype_of_kind('f', bytes);
  return std::nullopt;
}

Strides in_elements(Strides bytes, std::int64_t item, const Shape& shape) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    // The stride of a dimension with at most one item has no meaning.
    if (shape[i] <= 1) bytes[i] = 0;
    if (bytes[i] % item != 0)
      refuse(fmt::format("steps of {} bytes between elements of {}: copy it first", bytes[i], item));
    bytes[i] /= item;
  }
  return bytes;
}

Tensor tensor_at(DType dtype, Shape shape, void* data, Strides strides, std::shared_ptr<const void> owner,
                 bool is_read_only) {
  const TensorView view(dtype, std::move(shape), data, std::move(strides));
  if (is_read_only) return {view, std::move(owner)};
  return {view, std::move(owner), static_cast<std::byte*>(data)};
}

const char* format_of(DType dtype) {
  constexpr std::array<std::pair<DType, const char*>, 13> formats = {{{DType::boolean, "?"},
                                                                      {DType::u8, "B"},
                                                                      {DType::i8, "b"},
                                                                      {DType::u16, "H"},
                                                                      {DType::i16, "h"},
                                                                      {DType::u32, "I"},
                                                                      {DType::i32, "i"},
                                                                      {DType::u64, "Q"},
                                                                      {DType::i64, "q"},
                                                                      {DType::f16, "e"},
                                                                      {DType::f32, "f"},
                                                                      {DType::f64, "d"},
                                                                      {DType::complex64, "Zf"}}};
  const auto* const found = std::ranges::find(formats, dtype, &std::pair<DType, const char*>::first);
  return found == formats.end() ? nullptr : found->second;
}
bool has_format(DType dtype) {
  return format_of(dtype) != nullptr;
}

/// The arrays that an exported buffer points to.
struct Export {
  Tensor tensor;
  std::vector<Py_ssize_t> shape;
  std::vector<Py_ssize_t> strides;
};

int get_buffer(PyObject* self, Py_buffer* out, int flags) {
  out->obj = nullptr;
  const auto refuse_request = [](const char* words) {
    PyErr_SetString(PyExc_BufferError, words);
    return -1;
  };
  const Tensor& tensor = *nb::inst_ptr<Tensor>(self);
  if (!tensor.device().is_host()) return refuse_request("the tensor is on a device");
  // A format of other elements would silently change their values. After this refusal NumPy calls __array__.
  if ((flags & PyBUF_FORMAT) != 0 && !has_format(tensor.dtype()))
    return refuse_request(
        "the buffer protocol has no format for this dtype: use view(\"U8\") for its bytes, or numpy()");
  if ((flags & PyBUF_WRITABLE) != 0 && !tensor.is_writable()) return refuse_request("the tensor is read-only");
  const bool wants_strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES;
  if (!tensor.view().is_contiguous() && !wants_strides) return refuse_request("the tensor is not contiguous");
  const auto wants = [&](int order) { return (flags & order) == order; };
  if (!tensor.view().is_contiguous() && (wants(PyBUF_C_CONTIGUOUS) || wants(PyBUF_F_CONTIGUOUS)))
    return refuse_request("the tensor is not contiguous");
  try {
    auto kept = std::make_unique<Export>();
    kept->tensor = tensor;
    const bool packed = is_packed(tensor.dtype());
    const auto item = static_cast<Py_ssize_t>(packed ? 1 : itemsize(tensor.dtype()));
    if (packed)
      kept->shape = {static_cast<Py_ssize_t>(tensor.nbytes())};
    else
      kept->shape.assign(tensor.shape().begin(), tensor.shape().end());
    kept->strides.resize(kept->shape.size());
    Py_ssize_t step = item;
    for (std::size_t i = kept->shape.size(); i-- > 0; step *= kept->shape[i])
      kept->strides[i] = tensor.view().is_contiguous() ? step : tensor.view().strides()[i] * item;
    static std::byte nothing{};
    out->buf = tensor.data() == nullptr ? &nothing : const_cast<std::byte*>(tensor.data());
    out->len = static_cast<Py_ssize_t>(tensor.nbytes());
    out->itemsize = item;
    out->readonly = tensor.is_writable() ? 0 : 1;
    out->ndim = static_cast<int>(kept->shape.size());
    out->format = (flags & PyBUF_FORMAT) != 0 ? const_cast<char*>(format_of(tensor.dtype())) : nullptr;
    out->shape = (flags & PyBUF_ND) != 0 ? kept->shape.data() : nullptr;
    out->strides = wants_strides ? kept->strides.data() : nullptr;
    out->suboffsets = nullptr;
    out->internal = kept.release();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return -1;
  }
  out->obj = Py_NewRef(self);
  return 0;
}

void release_buffer(PyObject*, Py_buffer* buffer) {
  delete static_cast<Export*>(buffer->internal);
}

}  // namespace

const PyType_Slot buffer_slots[3] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
    {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
    {0, nullptr},
};

Tensor tensor_from_buffer(nb::handle object) {
  auto buffer = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(object.ptr(), buffer.get(), PyBUF_RECORDS_RO) != 0) throw nb::python_error();
  Py_buffer* held = buffer.release();
  const std::shared_ptr<Py_buffer> owner(held, [](Py_buffer* kept) {
    if (Py_IsInitialized() == 0) return;
    const PyGILState_STATE state = ensured_gil();
    PyBuffer_Release(kept);
    PyGILState_Release(state);
    delete kept;
  });
  const std::string_view format = held->format == nullptr ? "B" : held->format;
  const auto dtype = dtype_of_format(format, held->itemsize);
  if (!dtype) refuse(fmt::format("there is no dtype for elements of {} bytes and format '{}'", held->itemsize, format));
  Shape shape(held->shape, held->shape + held->ndim);
  Strides strides = in_elements(Strides(held->strides, held->strides + held->ndim), held->itemsize, shape);
  return tensor_at(*dtype, std::move(shape), held->buf, std::move(strides), owner, held->readonly != 0);
}

ArrayInterface array_interface_of(nb::handle object, const char* name) {
  const auto told = nb::cast<nb::dict>(object.attr(name));
  const auto type = nb::cast<std::string>(nb::str(told["typestr"]));
  const std::int64_t item = type.size() < 3 ? 0 : std::strtoll(type.c_str() + 2, nullptr, 10);
  const auto dtype = type.empty() || (type.front() == '>' && item != 1) ? std::nullopt : dtype_of_kind(type[1], item);
  if (!dtype) refuse(fmt::format("there is no dtype for {}'s '{}'", name, type));
  Shape shape;
  for (const nb::handle extent : nb::cast<nb::sequence>(told["shape"])) shape.push_back(nb::cast<std::int64_t>(extent));
  const nb::object data = told.contains("data") ? nb::object(told["data"]) : nb::none();
  if (!nb::isinstance<nb::tuple>(data)) refuse(fmt::format("{} has no address", name));
  Strides strides;
  if (told.contains("strides") && !told["strides"].is_none()) {
    for (const nb::handle step : nb::cast<nb::sequence>(told["strides"]))
      strides.push_back(nb::cast<std::int64_t>(step));
    if (strides.size() == shape.size()) strides = in_elements(std::move(strides), item, shape);
  }
  void* address = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(data[0]));  // NOLINT(performance-no-int-to-ptr)
  return {*dtype, std::move(shape), std::move(strides), address, nb::cast<bool>(data[1])};
}

Tensor tensor_from_array_interface(nb::handle object) {
  ArrayInterface told = array_interface_of(object, "__array_interface__");
  return tensor_at(told.dtype, std::move(told.shape), told.address, std::move(told.strides),
                   owner_of(nb::borrow(object)), told.is_read_only);
}

std::string typestr_of(DType dtype) {
  const std::string_view name = to_string(dtype);
  const char kind =
      name.front() == 'B' ? 'b' : static_cast<char>(std::tolower(static_cast<unsigned char>(name.front())));
  const std::size_t bytes = itemsize(dtype);
  if (dtype_of_kind(kind, static_cast<std::int64_t>(bytes)) != dtype) return {};
  return fmt::format("{}{}{}", bytes == 1 ? '|' : '<', kind, bytes);
}

}  // namespace muster::python
