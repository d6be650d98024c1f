// SPDX-License-Identifier: Apache-2.0
#pragma once
// Arguments of the collective calls of process groups.

#include <optional>

#include "muster/process_group.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "src/collectives/engine.hpp"

namespace muster::python {

inline CollectiveOptions collective_options_of(nb::handle timeout) {
  return {.timeout = timeout_of(argument_of<std::optional<double>>(timeout, "timeout"))};
}

/// Converts the arguments of a collective call of a process group. If that fails on one rank, all ranks raise the
/// error.
template <class Make>
auto made_in(ProcessGroup& group, const Make& make) -> decltype(make()) {
  return made_or_refused(make, [&](const Error& failure) { collectives::engine_of(group).refuse(failure); });
}

}  // namespace muster::python
