// SPDX-License-Identifier: Apache-2.0
#pragma once
// Arguments whose types are checked inside a call, so that an error about them can be reported to the other ranks.

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"
#include "src/group/group.hpp"

namespace muster::python {

/// Throws Error(invalid_argument), because the argument `name` has the type of `object` instead of the expected one.
[[noreturn]] void refuse_argument(nb::handle object, const char* name, const char* wanted);

/// Returns the result of operator.index(). Throws Error(invalid_argument) for floats, texts and other types.
std::int64_t integer_of(nb::handle object, const char* name);

template <class Value>
struct Argument {
  static Value of(nb::handle object, const char* name) {
    const bool is_text = nb::isinstance<nb::str>(object);
    const char* wanted = std::same_as<Value, bool>           ? "a bool"
                         : !std::same_as<Value, std::string> ? "a number"
                         : is_text                           ? "one without lone surrogates"
                                                             : "a str";
    Value value{};
    if (!nb::try_cast(object, value)) refuse_argument(object, name, wanted);
    return value;
  }
};

template <>
struct Argument<int> {
  static int of(nb::handle object, const char* name) {
    const std::int64_t value = integer_of(object, name);
    if (!std::in_range<int>(value)) refuse_argument(object, name, "one of 32 bits");
    return static_cast<int>(value);
  }
};

template <>
struct Argument<std::int64_t> {
  static std::int64_t of(nb::handle object, const char* name) { return integer_of(object, name); }
};

template <class Value>
struct Argument<std::vector<Value>> {
  static std::vector<Value> of(nb::handle object, const char* name) {
    const auto items = nb::steal(nb::isinstance<nb::str>(object) ? nullptr : PyObject_GetIter(object.ptr()));
    if (!items.is_valid()) {
      PyErr_Clear();
      refuse_argument(object, name, "a list");
    }
    std::vector<Value> values;
    // Exceptions of the iterator are passed on.
    for (nb::object item; (item = nb::steal(PyIter_Next(items.ptr()))).is_valid();)
      values.push_back(Argument<Value>::of(item, name));
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return values;
  }
};

template <class Value>
struct Argument<std::optional<Value>> {
  static std::optional<Value> of(nb::handle object, const char* name) {
    if (object.is_none()) return std::nullopt;
    return Argument<Value>::of(object, name);
  }
};

/// Converts an argument to a bool, a number, a text, a list or an optional of one. Throws Error(invalid_argument) with
/// `name`.
template <class Value>
Value argument_of(nb::handle object, const char* name) {
  return Argument<Value>::of(object, name);
}

/// Returns the result of make(), which converts Python objects to the arguments of a collective call. If it fails,
/// refuse(error) takes part in the call for this rank, so that all ranks raise the error and the group remains usable.
template <class Make, class Refuse>
auto made_or_refused(const Make& make, const Refuse& refuse) -> decltype(make()) {
  std::optional<Error> failure;
  try {
    return converted(make);
  } catch (const Error& error) {
    failure = error;
  }
  without_gil([&] { refuse(*failure); });
  throw Error(*failure);
}

/// Does the same for calls of a group that begin with Group::together().
template <class Make>
auto made_for(Group& group, const Make& make) -> decltype(make()) {
  return made_or_refused(make, [&](const Error& failure) { group::inside(group).refuse(failure); });
}

/// Runs a callback into Python, and converts its exception to the failure that all ranks receive.
template <class Call>
auto call_python(const Call& call) -> decltype(call()) {
  const InPython in_python;
  try {
    return call();
  } catch (nb::python_error& raised) {
    throw error_of(raised, ErrorKind::io);
  }
}

}  // namespace muster::python
