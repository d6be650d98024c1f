// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared declarations of muster._core. The Python modules of the package define the public names, defaults and
// docstrings.

#include <nanobind/nanobind.h>
// All source files must include the same type casters; otherwise they would convert the same types differently.
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
#include "muster/group.hpp"
#include "muster/tensor.hpp"
#include "python/core/closable.hpp"

namespace muster::python {

namespace nb = nanobind;

// Types of Python with the arguments that the stub needs.
using Any = nb::typed<nb::object, nb::any>;
using Dict = nb::typed<nb::dict, nb::str, nb::any>;
using List = nb::typed<nb::list, nb::any>;
using Function = nb::typed<nb::callable, nb::any(...)>;
/// A tuple of int.
using Ints = nb::typed<nb::tuple, int, nb::ellipsis>;
/// A tuple of any objects.
using Objects = nb::typed<nb::tuple, nb::any, nb::ellipsis>;

void bind_collectives(nb::module_& module);
void bind_compat(nb::module_& module);
void bind_errors(nb::module_& module);
void bind_exports(nb::module_& module);
void bind_tensors(nb::module_& module);
void bind_files(nb::module_& module);
void bind_groups(nb::module_& module);
void bind_gathers(nb::module_& module);
void bind_launches(nb::module_& module);
void bind_logs(nb::module_& module);
void bind_queues(nb::module_& module);
void bind_roles(nb::module_& module);
void bind_traces(nb::module_& module);
void bind_versions(nb::module_& module);

enum class Trace { told, left_out };

/// Whether a call takes tensors on GPUs.
enum class Devices : std::uint8_t { refused, accepted };

/// Converts a Python exception to an Error: the original failure if it is one of muster.errors, else one of the kind
/// `otherwise` with the name of its class in front of its message. The last lines of its traceback follow.
Error error_of(nb::python_error& raised, ErrorKind otherwise, Trace trace = Trace::told);

/// Returns the error for an object that does not have the type that it is cast to.
Error not_of_its_type();

/// Returns the result of make(), which converts Python objects to arguments. Its exceptions are converted by
/// error_of().
template <class Make>
auto converted(const Make& make) -> decltype(make()) {
  try {
    return make();
  } catch (nb::python_error& error) {
    throw error_of(error, ErrorKind::invalid_argument);
  } catch (const nb::cast_error&) {
    throw not_of_its_type();
  }
}

/// Keeps a Python object alive as long as the result exists, on any thread.
std::shared_ptr<const void> owner_of(nb::object object);

/// Converts an object to a tensor, which keeps the object alive: a muster.Tensor, or an object with the buffer
/// protocol, __dlpack__ or __array_interface__. Throws Error(invalid_argument) with `path` in front of the message.
/// Objects on GPUs need Devices::accepted; a muster.Tensor may be on a GPU in any case.
Tensor tensor_of(nb::handle object, Devices devices = Devices::refused);

/// Converts a Python object to a config. Throws Error(invalid_argument) that names the position of an invalid value:
/// `config["scale"]: ...`.
Config config_of(nb::handle object, Devices devices = Devices::refused);
/// Converts a config to dict, list, str, int, float, bool, None and muster.Tensor.
nb::object object_of(const Config& config);

/// Converts text to a str. Bytes that are not UTF-8, which texts of other ranks or of files may contain, become lone
/// surrogates.
nb::object text_object(const std::string& text);

/// Returns the strides in elements, also for a contiguous view.
Strides full_strides(const TensorView& view);

/// Returns the bytes of an int, or of text such as "256MiB". Throws Error(invalid_argument).
std::uint64_t bytes_of(nb::handle size);

/// Returns the dtype of a name, or of a dtype of NumPy, ml_dtypes or PyTorch. Throws Error(invalid_argument).
DType dtype_of(nb::handle dtype);

/// Converts a muster.Group, or a process group of torch.distributed; None: the world.
std::shared_ptr<Group> group_of(nb::handle group);

/// Converts seconds; unset: the default of the group. Throws Error(invalid_argument) if the value is not positive.
std::optional<std::chrono::milliseconds> timeout_of(std::optional<double> seconds);

/// Returns the ranks of a list; unset: all ranks.
RankList list_of(const std::optional<std::vector<int>>& ranks);

}  // namespace muster::python
