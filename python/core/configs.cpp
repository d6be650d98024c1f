// SPDX-License-Identifier: Apache-2.0
// Conversions between Config and Python objects.

#include <fmt/core.h>

#include <cstdint>
#include <string>
#include <utility>

#include "muster/error.hpp"
#include "python/core/bindings.hpp"

namespace muster::python {
namespace {

/// The position of a value in the tree; converted to text only for an error.
struct Place {
  const Place* above = nullptr;
  PyObject* key = nullptr;  // null for an item of a list
  Py_ssize_t index = 0;
  Devices devices = above == nullptr ? Devices::refused : above->devices;

  [[nodiscard]] std::string text() const {
    if (above == nullptr) return "config";
    if (key == nullptr) return fmt::format("{}[{}]", above->text(), index);
    const nb::object name = nb::steal(PyObject_Repr(key));
    if (!name.is_valid()) PyErr_Clear();
    return fmt::format("{}[{}]", above->text(), name.is_valid() ? nb::cast<nb::str>(name).c_str() : "?");
  }
  [[noreturn]] void refuse(const std::string& words, ErrorKind kind = ErrorKind::invalid_argument) const {
    throw Error(kind, text() + ": " + words);
  }
};

std::string text_of(PyObject* object, const Place& place) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &length);
  if (text == nullptr) {
    PyErr_Clear();
    place.refuse("the str is not valid Unicode (it has lone surrogates)");
  }
  return {text, static_cast<std::size_t>(length)};
}

Config integer_of(PyObject* object, const Place& place) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow == 0) return static_cast<std::int64_t>(value);
  if (overflow > 0) {
    const unsigned long long large = PyLong_AsUnsignedLongLong(object);
    if (PyErr_Occurred() == nullptr) return static_cast<std::uint64_t>(large);
    PyErr_Clear();
  }
  place.refuse("an int beyond 64 bits");
}

bool looks_like_tensor(PyObject* object) {
  return nb::isinstance<Tensor>(nb::handle(object)) || PyObject_CheckBuffer(object) != 0 ||
         nb::hasattr(object, "__dlpack__") || nb::hasattr(object, "__array_interface__") ||
         nb::hasattr(object, "__cuda_array_interface__");
}

Config value_of(PyObject* object, const Place& place, int depth);

Config object_of_dict(PyObject* object, const Place& place, int depth) {
  ConfigObject members;
  members.reserve(static_cast<std::size_t>(PyDict_Size(object)));
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(object, &position, &key, &value) != 0) {
    if (PyUnicode_Check(key) == 0) place.refuse(fmt::format("a key is {}, not str", nb::inst_name(key).c_str()));
    // Python code that a conversion runs may change the dict.
    const nb::object kept = nb::borrow(value);
    members.insert(text_of(key, place), value_of(value, {&place, key, 0}, depth + 1));
  }
  return members;
}

Config array_of(PyObject* object, const Place& place, int depth) {
  ConfigArray items;
  const bool is_list = PyList_Check(object) != 0;
  for (Py_ssize_t i = 0; i < (is_list ? PyList_Size(object) : PyTuple_Size(object)); ++i) {
    const nb::object item = nb::borrow(is_list ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i));
    items.push_back(value_of(item.ptr(), {&place, nullptr, i}, depth + 1));
  }
  return items;
}

/// Converts an instance of a dataclass as a dict of its fields.
Config object_of_fields(PyObject* object, const Place& place, int depth) {
  const nb::handle handle(object);
  const nb::object fields = converted([&] { return nb::module_::import_("dataclasses").attr("fields")(handle); });
  ConfigObject members;
  for (const nb::handle field : nb::cast<nb::tuple>(fields)) {
    const nb::object name = field.attr("name");
    const nb::object value = converted([&] { return nb::object(handle.attr(name)); });
    members.insert(text_of(name.ptr(), place), value_of(value.ptr(), {&place, name.ptr(), 0}, depth + 1));
  }
  return members;
}

Config leaf_of(PyObject* object, const Place& place, int depth) {
  const nb::handle handle(object);
  if (PyType_Check(object) == 0 && nb::hasattr(handle, "__dataclass_fields__") && !looks_like_tensor(object))
    return object_of_fields(object, place, depth);
  const auto convert = [&]() -> std::optional<Config> {
    // A scalar of NumPy is a number, not a tensor.
    if (nb::hasattr(handle, "item") && !nb::hasattr(handle, "__dlpack_device__") && nb::hasattr(handle, "dtype")) {
      const nb::object plain = handle.attr("item")();
      PyObject* value = plain.ptr();
      if (PyBool_Check(value) != 0 || PyLong_Check(value) != 0 || PyFloat_Check(value) != 0)
        return value_of(value, place, 0);
    }
    // JSON has no bytes, and a tensor in their place would come back as another type.
    if (PyBytes_Check(object) != 0)
      throw Error(ErrorKind::invalid_argument,
                  "bytes is not a value of a config: pass a str (.decode()), or a tensor of its bytes "
                  "(muster.as_tensor(value))");
    if (looks_like_tensor(object)) return tensor_of(handle, place.devices);
    return std::nullopt;
  };
  try {
    if (auto value = converted(convert)) return std::move(*value);
  } catch (const Error& error) {
    place.refuse(error.what(), error.kind());
  }
  place.refuse(fmt::format(
      "{} is not a value: it takes dict with str keys, dataclass, list, tuple, str, int, float, bool, None and tensors",
      nb::inst_name(object).c_str()));
}

Config value_of(PyObject* object, const Place& place, int depth) {
  if (depth > max_config_depth)
    throw Error(ErrorKind::invalid_argument, fmt::format("config: nested more than {} deep", max_config_depth));
  if (object == Py_None) return nullptr;
  if (PyBool_Check(object) != 0) return object == Py_True;
  if (PyLong_Check(object) != 0) return integer_of(object, place);
  if (PyFloat_Check(object) != 0) return PyFloat_AsDouble(object);
  if (PyUnicode_Check(object) != 0) return text_of(object, place);
  if (PyDict_Check(object) != 0) return object_of_dict(object, place, depth);
  if (PyList_Check(object) != 0 || PyTuple_Check(object) != 0) return array_of(object, place, depth);
  return leaf_of(object, place, depth);
}

}  // namespace

nb::object text_object(const std::string& text) {
  return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape"));
}

Config config_of(nb::handle object, Devices devices) {
  return value_of(object.ptr(), {.devices = devices}, 0);
}

nb::object object_of(const Config& config) {
  switch (config.type()) {
    case Config::Type::null:
      return nb::none();
    case Config::Type::boolean:
      return nb::bool_(config.as_bool());
    case Config::Type::integer:
      return nb::int_(config.as_int());
    case Config::Type::unsigned_integer:
      return nb::int_(config.as_uint());
    case Config::Type::real:
      return nb::float_(config.as_double());
    case Config::Type::string:
      return text_object(config.as_string());
    case Config::Type::array: {
      nb::list list;
      for (const Config& item : config.as_array()) list.append(object_of(item));
      return list;
    }
    case Config::Type::object: {
      nb::dict dict;
      for (const auto& [key, value] : config.as_object()) dict[text_object(key)] = object_of(value);
      return dict;
    }
    case Config::Type::tensor:
      return nb::cast(config.as_tensor());
  }
  return nb::none();
}

}  // namespace muster::python
