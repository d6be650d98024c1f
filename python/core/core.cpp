// SPDX-License-Identifier: Apache-2.0
// The extension module muster._core.

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <string>

#include "muster/version.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"
#include "src/os/clock.hpp"

namespace {

/// The GIL protects the data that the bindings share, and its thread states belong to the main interpreter.
void check_interpreter() {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0)  // that of the main one is 0
    throw nanobind::import_error(
        "importing muster: this is a subinterpreter, and muster runs in the main one alone: use processes "
        "(muster.launch)");
  const nanobind::object flags = nanobind::module_::import_("sys").attr("abiflags");
  if (nanobind::cast<std::string>(flags).find('t') != std::string::npos)
    throw nanobind::import_error(
        "importing muster: this Python has no GIL (free threading), which muster needs: use the ordinary build of it");
}

/// Wheels also install on older kernels. This is the newest call that muster needs.
void check_kernel() {
#ifdef SYS_close_range
  constexpr auto no_descriptor = ~0U;
  if (::syscall(SYS_close_range, no_descriptor, no_descriptor, 0) != 0 && errno == ENOSYS)
    throw nanobind::import_error(
        "importing muster: this kernel or sandbox has no close_range(), which muster needs: use Linux 5.9 or later");
#endif
}

}  // namespace

NB_MODULE(_core, module) {
  using namespace muster::python;
  check_interpreter();
  check_kernel();
  module.attr("version") = std::string(muster::version());
  // Results and groups may exist until the interpreter exits; that is not a leak.
  nb::set_leak_warnings(false);
  bind_errors(module);
  bind_tensors(module);
  bind_groups(module);
  bind_files(module);
  bind_exports(module);
  bind_versions(module);
  bind_gathers(module);
  bind_launches(module);
  bind_logs(module);
  bind_traces(module);
  bind_collectives(module);
  bind_queues(module);
  bind_roles(module);
  bind_compat(module);
  install_interrupt_hook();
  module.def(
      "clock", [] { return std::chrono::duration<double>(muster::os::Clock::now().time_since_epoch()).count(); },
      "Returns the seconds of the clock of deadlines, which does not advance while this process is suspended.");
}
