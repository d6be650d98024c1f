// SPDX-License-Identifier: Apache-2.0
#pragma once
// Arguments whose types are looked at inside of a call, where the other ranks can be told what is wrong with them.

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/core/bindings.hpp"
#include "src/sync/failing.hpp"

namespace muster::python {

/// Throws Error(argument): `name` is of the object's type, and not what is wanted.
[[noreturn]] void refuse_argument(nb::handle object, const char* name, const char* wanted);

/// What operator.index() gives: of floats and texts nothing. Throws Error(argument).
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
    // What its iterator raises is its own.
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

/// An argument as a bool, a number, a text, a list or an optional of one. Throws Error(argument) with `name`.
template <class Value>
Value argument_of(nb::handle object, const char* name) {
  return Argument<Value>::of(object, name);
}

/// What a call was given for a parameter of type Value: any object.
template <class Value>
struct Given {
  nb::object object;
  operator nb::handle() const { return object; }
};
/// For a tensor: objects of many types.
using GivenTensor = Given<nb::object>;

/// make(), which turns Python's objects into arguments of a call. If it cannot, the others wait already: that is the
/// end of the group.
template <class Make>
auto made_for(SyncGroup& group, const Make& make) -> decltype(make()) {
  return sync::or_fail(group, [&] { return converted(make); });
}

/// argument_of() for such a call.
template <class Value>
Value value_for(SyncGroup& group, const Given<Value>& given, const char* name) {
  return made_for(group, [&] { return argument_of<Value>(given, name); });
}

}  // namespace muster::python

namespace nanobind::detail {

template <class Wanted>
struct type_caster<muster::python::Given<Wanted>> {
  NB_TYPE_CASTER(muster::python::Given<Wanted>, const_name("object"))
  bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept {
    value.object = borrow(source);
    return true;
  }
};
/// None comes through, too.
template <class Wanted>
struct has_arg_defaults<muster::python::Given<Wanted>> : std::true_type {};
template <class Wanted>
struct remove_opt_mono<muster::python::Given<Wanted>> : remove_opt_mono<Wanted> {};

}  // namespace nanobind::detail
