// SPDX-License-Identifier: Apache-2.0
// muster.launch(): commands and Python functions as the ranks of a job.

#include <fmt/core.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/compat/dist.hpp"
#include "muster/compat/multiprocess.hpp"
#include "muster/parallel_groups.hpp"
#include "muster/state.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/devices.hpp"
#include "python/core/waiting.hpp"
#include "src/compat/dist.hpp"
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

constexpr const char* registered_setup_name = "muster.launch.setup";

/// Runs in a rank before it meets the other ranks. The name of the setup function follows the arguments of call_target.
void call_setup(std::span<const std::string> arguments) {
  call_target(std::array{arguments[2], arguments[1]});
}
const RegisteredFunction registered_setup(registered_setup_name, call_setup);

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

// The functions of ml-starter (muster.compat.ml). A config is a dict of the fields of MultiprocessConfig, with None for
// missing values.

template <class Field>
void each_field(MultiprocessConfig& config, const Field& field) {
  field("rank", config.rank);
  field("local_rank", config.local_rank);
  field("world_size", config.world_size);
  field("local_world_size", config.local_world_size);
  field("master_addr", config.master_addr);
  field("master_port", config.master_port);
  field("init_method", config.init_method);
  field("model_parallelism", config.model_parallelism);
  field("pipeline_parallelism", config.pipeline_parallelism);
  field("backend", config.backend);
  field("model_parallel_backend", config.model_parallel_backend);
  field("pipeline_parallel_backend", config.pipeline_parallel_backend);
  field("data_parallel_backend", config.data_parallel_backend);
}

MultiprocessConfig multiprocess_config_of(const nb::dict& given) {
  MultiprocessConfig config{.launch_method = LaunchMethod::spawn};
  each_field(config, [&]<class Value>(const char* name, Value& value) {
    const nb::object from = given[name];
    if constexpr (std::is_same_v<Value, std::string>)
      value = argument_of<std::optional<std::string>>(from, name).value_or("");
    else
      value = argument_of<Value>(from, name);
  });
  return config;
}

/// Returns the resolved fields, and an object that keeps the port reserved.
nb::tuple resolved(const nb::dict& given) {
  MultiprocessConfig config = multiprocess_config_of(given);
  config.resolve();
  nb::dict fields;
  each_field(config, [&](const char* name, const auto& value) { fields[name] = value; });
  if (!config.port_holder) return nb::make_tuple(fields, nb::none());
  using Holder = std::shared_ptr<const void>;
  auto holder = std::make_unique<Holder>(std::move(config.port_holder));
  nb::capsule kept(holder.get(), [](void* held) noexcept { delete static_cast<Holder*>(held); });
  (void)holder.release();
  return nb::make_tuple(fields, kept);
}

/// `target` is called with the members of `arguments`, as is `setup`, unless it is empty.
void launch_ranks(const std::vector<std::string>& program, const std::string& target, nb::handle arguments,
                  const std::string& setup, const nb::dict& given, nb::handle rank_offset) {
  const MultiprocessConfig config = multiprocess_config_of(given);
  SubprocessOptions options{.arguments = {target, to_json(config_of(arguments)), setup},
                            .setup = setup.empty() ? "" : registered_setup_name,
                            .rank_offset = argument_of<int>(rank_offset, "rank_offset"),
                            .program = program};
  options.launch.output = RankOutput::lines;
  without_gil([&] { launch_subprocesses(registered_name, config, options); });
}

/// Returns a group of the ranks of dist::init_process_group(). Collective.
std::shared_ptr<Group> dist_group() {
  return without_gil([] { return dist::process_group().group().duplicate(); });
}

}  // namespace

void bind_launches(nb::module_& module) {
  module.def("launch", launch, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg());
  module.def(
      "launch_ranks", launch_ranks, nb::arg("program"), nb::arg("target"), nb::arg("arguments"), nb::arg("setup"),
      nb::arg("config"), nb::arg("rank_offset"),
      nb::sig("def launch_ranks(program: typing.Sequence[str], target: str, arguments: object, setup: str, config: "
              "dict[str, typing.Any], rank_offset: object) -> None"));
  module.def("resolved_config", resolved, nb::arg("config"),
             nb::sig("def resolved_config(config: dict[str, typing.Any]) -> tuple[dict[str, typing.Any], object]"));
  module.def("default_backend", &default_backend);
  module.def("check_backend_name",
             [](nb::handle name) { collectives::check_backend_name(argument_of<std::string>(name, "backend")); });
  module.def(
      "init_dist",
      [](const nb::dict& config) {
        const MultiprocessConfig given = multiprocess_config_of(config);
        load_devices_if_installed();
        without_gil([&] { init_dist(given); });
      },
      nb::arg("config"), nb::sig("def init_dist(config: dict[str, typing.Any]) -> None"));
  module.def(
      "init_process_group",
      [](const std::string& backend) {
        load_devices_if_installed();
        without_gil([&] { dist::init_process_group(backend); });
      },
      nb::arg("backend"));
  module.def(
      "init_parallelism",
      [](const nb::dict& config) {
        const MultiprocessConfig given = multiprocess_config_of(config);
        without_gil([&] { init_parallelism(given); });
      },
      nb::arg("config"), nb::sig("def init_parallelism(config: dict[str, typing.Any]) -> None"));
  module.def("dist_group", dist_group);
  module.def("end_dist", [] {
    without_gil([] {
      destroy_parallel_groups();
      dist::destroy_process_group();
    });
  });
  module.def("run_if_launched", [] { return without_gil([] { return launch::run_if_launched(); }); });
}

}  // namespace muster::python
