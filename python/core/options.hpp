// SPDX-License-Identifier: Apache-2.0
#pragma once
// Options that Python passes as a dict.

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "muster/error.hpp"
#include "muster/parallel_layout.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"

namespace muster::python {

/// Returns the texts of a dict {str: str}. Throws Error(invalid_argument) with `name`.
inline std::map<std::string, std::string> texts_of(nb::handle dict, const char* name) {
  std::map<std::string, std::string> texts;
  if (!nb::isinstance<nb::dict>(dict)) refuse_argument(dict, name, "a dict");
  for (const auto& [key, value] : nb::borrow<nb::dict>(dict))
    texts[argument_of<std::string>(key, name)] = argument_of<std::string>(value, name);
  return texts;
}

/// Sets options by their C++ names; options that are not given keep their values.
class Options {
 public:
  explicit Options(const nb::dict& given) : given_(given) {}

  template <class Value>
  void take(const char* name, Value& value) const {
    read(name, [&](nb::handle object) { value = nb::cast<Value>(object); });
  }
  void take(const char* name, ParallelLayout& value) const {
    read(name, [&](nb::handle object) { value = ParallelLayout::parse(nb::cast<std::string>(nb::str(object))); });
  }
  void take(const char* name, std::chrono::seconds& value) const {
    read(name, [&](nb::handle object) {
      // A century, which is far from the limits of a clock.
      constexpr double longest = 100.0 * 365 * 24 * 3600;
      const auto seconds = nb::cast<double>(object);
      if (!(seconds >= 0))
        throw Error(ErrorKind::invalid_argument, fmt::format("{}: {} is not a time of at least 0 s", name, seconds));
      value = std::chrono::ceil<std::chrono::seconds>(std::chrono::duration<double>(std::min(seconds, longest)));
    });
  }
  void take(const char* name, std::map<std::string, std::string>& value) const {
    read(name, [&](nb::handle object) { value = texts_of(object, name); });
  }
  void take(const char* name, DType& value) const {
    read(name, [&](nb::handle object) { value = dtype_of(object); });
  }
  template <class Value>
  void take(const char* name, std::optional<Value>& value) const {
    if (given_.contains(name) && !given_[name].is_none()) take(name, value.emplace());
  }
  void take_bytes(const char* name, std::uint64_t& value) const {
    read(name, [&](nb::handle object) { value = bytes_of(object); });
  }

 private:
  template <class Read>
  void read(const char* name, const Read& read) const {
    if (!given_.contains(name)) return;
    try {
      read(given_[name]);
    } catch (nb::python_error& error) {
      throw error_of(error, ErrorKind::invalid_argument);
    } catch (const nb::cast_error&) {
      throw Error(ErrorKind::invalid_argument, fmt::format("{}: the value does not have the expected type", name));
    }
  }

  const nb::dict& given_;
};

}  // namespace muster::python
