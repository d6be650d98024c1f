// SPDX-License-Identifier: Apache-2.0
// muster::Error as the exception classes of muster/errors.py.

#include <exception>
#include <string>
#include <string_view>

#include "muster/error.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"

namespace muster::python {
namespace {

void raise(const Error& error) {
  // Ctrl-C ended the wait, and the error only reports that. It may also have ended the awaited operation.
  if (restore_interrupt() || PyErr_CheckSignals() != 0) return;
  try {
    const std::string_view message = error.what();
    // The message of another rank may be truncated within a UTF-8 character.
    const nb::object text =
        nb::steal(PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()), "replace"));
    const nb::object path = nb::steal(PyUnicode_DecodeFSDefault(error.path().c_str()));
    const nb::object exception = nb::module_::import_("muster.errors")
                                     .attr("_make")(nb::str(to_string(error.kind()).data()), text, error.rank(),
                                                    error.host(), error.pid(), path, error.os_error());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  } catch (nb::python_error& failure) {
    failure.restore();
  }
}

}  // namespace

Error not_of_its_type() {
  return {ErrorKind::invalid_argument, "an argument does not have the expected type"};
}

Error error_of(nb::python_error& raised, ErrorKind otherwise, Trace trace) {
  try {
    const nb::object described =
        nb::module_::import_("muster.errors").attr("_describe")(raised.value(), trace == Trace::told);
    const auto bytes = nb::cast<nb::bytes>(described[1]);
    const std::string message(bytes.c_str(), bytes.size());
    if (!described[0].is_none())
      for (int number = 0; number <= static_cast<int>(ErrorKind::cancelled); ++number)
        if (to_string(static_cast<ErrorKind>(number)) == nb::cast<std::string>(described[0]))
          return {static_cast<ErrorKind>(number), message};
    return {otherwise, message};
  } catch (const nb::python_error&) {
    return {otherwise, nb::type_name(raised.type()).c_str()};
  }
}

void bind_errors(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    } catch (const nb::cast_error&) {
      raise(not_of_its_type());
    }
  });
}

}  // namespace muster::python
