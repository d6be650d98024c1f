// SPDX-License-Identifier: Apache-2.0
// The extension module muster._core.

#include <string>

#include "muster/version.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"

NB_MODULE(_core, module) {
  using namespace muster::python;
  module.attr("version") = std::string(muster::version());
  // Results and groups that live until the interpreter ends are nobody's mistake.
  nb::set_leak_warnings(false);
  bind_errors(module);
  bind_tensors(module);
  bind_groups(module);
  bind_files(module);
  bind_gathers(module);
  bind_traces(module);
  bind_collectives(module);
  install_interrupt_hook();
}
