// SPDX-License-Identifier: Apache-2.0
// muster.launch(): commands and Python functions as the ranks of a job.

#include <fmt/core.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "muster/compat/multiprocess.hpp"
#include "muster/state.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"
#include "src/launch/subprocesses.hpp"

namespace muster::python {
namespace {

constexpr const char* registered_name = "muster.launch";

/// Returns the failure of an exception, with the rank that it names as the cause. The launcher reports a failure that
/// names none.
Error failure_of(nb::python_error& raised) {
  const bool is_interrupt = raised.matches(PyExc_KeyboardInterrupt);
  // The launcher adds the end of the standard error of the rank, which contains the traceback.
  const Error error = error_of(raised, is_interrupt ? ErrorKind::cancelled : ErrorKind::peer_lost, Trace::left_out);
  ErrorDetails details;
  const nb::object rank = nb::getattr(raised.value(), "rank", nb::none());
  const nb::object pid = nb::getattr(raised.value(), "pid", nb::none());
  if (nb::isinstance<nb::int_>(rank)) details.rank = nb::cast<int>(rank);
  if (nb::isinstance<nb::int_>(pid)) details.pid = nb::cast<std::int64_t>(pid);
  return {error.kind(), error.what(), std::move(details)};
}

/// Runs in a rank, with the name of the target and its arguments as JSON.
void call_target(std::span<const std::string> arguments) {
  const InPython in_python;
  try {
    nb::module_::import_("muster._launch").attr("_call")(arguments[0], object_of(parse_json(arguments[1])));
  } catch (nb::python_error& raised) {
    throw failure_of(raised);
  }
}
const RegisteredFunction registered(registered_name, call_target);

RankOutput output_named(const std::string& name) {
  constexpr std::array<std::pair<const char*, RankOutput>, 3> all{
      {{"lines", RankOutput::lines}, {"prefixed", RankOutput::prefixed}, {"live", RankOutput::live}}};
  for (const auto& [each, output] : all)
    if (name == each) return output;
  throw Error(ErrorKind::invalid_argument,
              fmt::format("launch: output: unknown value '{}' (expected 'lines', 'prefixed' or 'live')", name));
}

std::chrono::milliseconds time_of(const Dict& options, const char* name) {
  const auto seconds = argument_of<double>(options[name], name);
  // A time of zero is valid here.
  return seconds == 0 ? std::chrono::milliseconds(0) : *timeout_of(seconds);
}

void launch(const std::vector<std::string>& program, const std::vector<std::string>& command, nb::handle arguments,
            int ranks, const Dict& options) {
  MultiprocessConfig config{.world_size = ranks, .launch_method = LaunchMethod::spawn};
  SubprocessOptions given{.program = program};
  if (!arguments.is_none()) given.arguments = {command[0], to_json(config_of(arguments))};
  for (const auto& [name, value] : nb::cast<nb::dict>(options["environment"]))
    given.launch.environment.emplace_back(argument_of<std::string>(name, "environment"),
                                          argument_of<std::string>(value, "environment"));
  given.launch.output = output_named(argument_of<std::string>(options["output"], "output"));
  given.launch.log_directory = nb::cast<std::string>(options["log_directory"]);
  given.launch.tee = argument_of<bool>(options["tee"], "tee");
  given.launch.grace = time_of(options, "grace");
  given.launch.kill_after = time_of(options, "kill_after");
  given.launch.timeout = timeout_of(argument_of<std::optional<double>>(options["timeout"], "timeout"));
  without_gil([&] {
    if (given.arguments.empty())
      launch_subprocesses(command, config, given);
    else
      launch_subprocesses(registered_name, config, given);
  });
}

}  // namespace

void bind_launches(nb::module_& module) {
  module.def("launch", launch, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg());
  module.def("run_if_launched", [] { return without_gil([] { return launch::run_if_launched(); }); });
}

}  // namespace muster::python
