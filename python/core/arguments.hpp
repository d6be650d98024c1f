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
#include "python/core/waiting.hpp"
#include "src/sync/group.hpp"

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
/// For a tensor: an object of any type that as_tensor() takes.
struct TensorLike {};
/// One of them, a list of them, or None.
struct TensorOrListLike {};

/// Returns make(), which turns Python's objects into the arguments of a collective call. If it fails, refuse(error)
/// takes this rank's part in the call, so that all ranks raise the error and the group remains usable.
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

/// The same for calls of a group that begin with Group::together().
template <class Make>
auto made_for(SyncGroup& group, const Make& make) -> decltype(make()) {
  return made_or_refused(make, [&](const Error& failure) { sync::inside(group).refuse(failure); });
}

}  // namespace muster::python

namespace nanobind::detail {

template <>
struct type_caster<muster::python::TensorLike> {
  static constexpr auto Name = const_name("muster._typing.TensorLike");
};
template <>
struct type_caster<muster::python::TensorOrListLike> {
  static constexpr auto Name =
      const_name("muster._typing.TensorLike | collections.abc.Sequence[muster._typing.TensorLike] | None");
};

template <class Wanted>
struct type_caster<muster::python::Given<Wanted>> {
  NB_TYPE_CASTER(muster::python::Given<Wanted>, make_caster<Wanted>::Name)
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
