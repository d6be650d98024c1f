// SPDX-License-Identifier: Apache-2.0
#include "python/core/arguments.hpp"

#include <fmt/core.h>

#include "muster/error.hpp"

namespace muster::python {

void refuse_argument(nb::handle object, const char* name, const char* wanted) {
  throw Error(ErrorKind::invalid_argument,
              fmt::format("{}: {} is not {}", name, nb::type_name(object.type()).c_str(), wanted));
}

std::int64_t integer_of(nb::handle object, const char* name) {
  const auto index = nb::steal(PyNumber_Index(object.ptr()));
  const bool is_integer = index.is_valid();
  int overflow = 0;
  const std::int64_t value = is_integer ? PyLong_AsLongLongAndOverflow(index.ptr(), &overflow) : 0;
  PyErr_Clear();
  if (!is_integer) refuse_argument(object, name, "an int");
  if (overflow != 0) refuse_argument(object, name, "one of 64 bits");
  return value;
}

}  // namespace muster::python
