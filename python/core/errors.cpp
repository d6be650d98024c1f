// SPDX-License-Identifier: Apache-2.0
// muster::Error as the exception classes of muster/errors.py.

#include <exception>
#include <string>

#include "muster/error.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"

namespace muster::python {
namespace {

void raise(const Error& error) {
  // Ctrl-C is what ended the wait: the error only says so. It may also have ended what the wait was for.
  if (restore_interrupt() || PyErr_CheckSignals() != 0) return;
  try {
    const nb::object exception = nb::module_::import_("muster.errors")
                                     .attr("_make")(nb::str(to_string(error.kind()).data()), error.what(), error.rank(),
                                                    error.host(), error.pid(), error.path(), error.os_error());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  } catch (nb::python_error& failure) {
    failure.restore();
  }
}

}  // namespace

Error error_of(nb::python_error& raised, ErrorKind otherwise) {
  const std::string name = nb::type_name(raised.type()).c_str();
  const std::string words = nb::str(raised.value()).c_str();
  const nb::object kind = nb::getattr(raised.value(), "kind", nb::none());
  if (nb::isinstance<nb::str>(kind))
    for (int number = 0; number <= static_cast<int>(ErrorKind::cancelled); ++number)
      if (to_string(static_cast<ErrorKind>(number)) == nb::cast<nb::str>(kind).c_str())
        return {static_cast<ErrorKind>(number), words};
  return {otherwise, words.empty() ? name : name + ": " + words};
}

void bind_errors(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace muster::python
