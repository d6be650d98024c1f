// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the parts of muster._core share. The package's modules in Python give it its names, defaults and manual.

#include <nanobind/nanobind.h>
// All source files need the same conversions: one without would convert the same types in another way.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/dtype.hpp"
#include "muster/error.hpp"
#include "muster/sync_group.hpp"
#include "muster/tensor.hpp"

namespace muster::python {

namespace nb = nanobind;

void bind_collectives(nb::module_& module);
void bind_errors(nb::module_& module);
void bind_tensors(nb::module_& module);
void bind_files(nb::module_& module);
void bind_groups(nb::module_& module);
void bind_gathers(nb::module_& module);
void bind_launches(nb::module_& module);
void bind_queues(nb::module_& module);
void bind_traces(nb::module_& module);

enum class Trace { told, left_out };

/// What a Python exception says: the failure that it is made of if it is one of muster.errors, else one of the kind
/// `otherwise` with the name of its class before its words; then the last lines of its traceback.
Error error_of(nb::python_error& raised, ErrorKind otherwise, Trace trace = Trace::told);

/// Of an object that has not the type that it is cast to.
Error not_of_its_type();

/// make(), which turns Python's objects into arguments; what is raised there is thrown as error_of() has it.
template <class Make>
auto converted(const Make& make) -> decltype(make()) {
  try {
    return make();
  } catch (nb::python_error& error) {
    throw error_of(error, ErrorKind::argument);
  } catch (const nb::cast_error&) {
    throw not_of_its_type();
  }
}

/// Keeps a Python object as long as somebody holds this, on any thread.
std::shared_ptr<const void> owner_of(nb::object object);

/// The tensor that an object is: a muster.Tensor, or what the buffer protocol, __dlpack__ or __array_interface__ tell
/// of. It keeps the object. Throws Error(argument) with `path` before its words.
Tensor tensor_of(nb::handle object);

/// The value of a Python object; throws Error(argument) that names the place of what is none: `config["scale"]: ...`.
Config config_of(nb::handle object);
/// dict, list, str, int, float, bool, None, muster.Tensor.
nb::object object_of(const Config& config);

/// A str; what is not UTF-8, as another rank's text or a file's may be, becomes lone surrogates.
nb::object text_object(const std::string& text);

/// Of an int, or of a text such as "256MiB". Throws Error(argument).
std::uint64_t bytes_of(nb::handle size);

/// The dtype of a name, or of a dtype of NumPy, ml_dtypes or PyTorch. Throws Error(argument).
DType dtype_of(nb::handle dtype);

/// A muster.Group, or a process group of torch.distributed; None: the world.
std::shared_ptr<SyncGroup> group_of(nb::handle group);

/// Seconds; none: the group's own. Throws Error(argument) on what is no time.
std::optional<std::chrono::milliseconds> timeout_of(std::optional<double> seconds);

/// The ranks of a list; none: all.
RankList list_of(const std::optional<std::vector<int>>& ranks);

}  // namespace muster::python
