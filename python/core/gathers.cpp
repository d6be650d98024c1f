// SPDX-License-Identifier: Apache-2.0
// Gathers, merges and streams. An error about the arguments of one rank is reported to the other ranks, as any failure
// is.

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "muster/async.hpp"
#include "muster/error.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/devices.hpp"
#include "python/core/waiting.hpp"
#include "src/gather/exchange.hpp"

namespace muster::python {
namespace {

using gather::GatherKind;

/// Returns make(), which converts Python objects to arguments. If it fails, every rank of the group receives the error.
/// `stop`: for a call in the background.
template <class Make>
auto arguments_of(GatherKind operation, Group& group, const std::stop_source* stop, const Make& make)
    -> decltype(make()) {
  return made_or_refused(make, [&](const Error& failure) {
    if (stop != nullptr) return gather::refuse_async(operation, failure, group);
    gather::refuse(operation, failure, all_ranks, group, {});
  });
}

Route route_named(const std::string& name) {
  constexpr std::array all{Route::auto_, Route::local, Route::shm,   Route::workspace,
                           Route::mpi,   Route::tcp,   Route::device};
  std::string names;
  for (const Route each : all) {
    if (to_string(each) == name) return each;
    names += fmt::format("{}'{}'", names.empty() ? "" : ", ", to_string(each));
  }
  throw Error(ErrorKind::invalid_argument, fmt::format("route: unknown value '{}' (expected one of {})", name, names));
}

using Ranks = std::optional<std::vector<int>>;

struct Asked {
  Ranks ranks;
  GatherOptions options;
};

std::string path_of(nb::handle path) {
  return path.is_none() ? std::string() : nb::cast<std::string>(nb::module_::import_("os").attr("fspath")(path));
}

/// Returns whether the option `name` is `second` and not `first`.
bool is_second(const Dict& options, const char* name, std::string_view first, std::string_view second) {
  const auto value = argument_of<std::string>(options[name], name);
  if (value != first && value != second)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("{}: unknown value '{}' (expected '{}' or '{}')", name, value, first, second));
  return value == second;
}

Asked asked(nb::handle ranks, const Dict& options, const std::stop_source* stop) {
  Asked asked{argument_of<Ranks>(ranks, "ranks"), {}};
  if (stop != nullptr) asked.options.stop = stop->get_token();
  load_devices_if_installed();
  if (is_second(options, "root_tensors", "borrow", "copy")) asked.options.root_tensors = RootTensors::copy;
  asked.options.writable = argument_of<bool>(options["writable"], "writable");
  if (!options["into"].is_none())
    for (const nb::handle each : nb::iter(options["into"])) asked.options.into.push_back(tensor_of(each));
  asked.options.route = route_named(argument_of<std::string>(options["route"], "route"));
  asked.options.timeout = timeout_of(argument_of<std::optional<double>>(options["timeout"], "timeout"));
  asked.options.pipeline_depth = argument_of<int>(options["pipeline_depth"], "pipeline_depth");
  if (!options["memory_budget"].is_none()) asked.options.memory_budget = bytes_of(options["memory_budget"]);
  if (!options["pool_limit"].is_none()) asked.options.pool_limit = bytes_of(options["pool_limit"]);
  asked.options.workspace.path = path_of(options["workspace_path"]);
  asked.options.workspace.keep_files = argument_of<bool>(options["keep_files"], "keep_files");
  asked.options.workspace.zstd_level = argument_of<std::optional<int>>(options["zstd_level"], "zstd_level");
  if (is_second(options, "destination", "host", "device")) asked.options.devices.destination = Destination::device;
  asked.options.debug.detect_writes = argument_of<bool>(options["detect_writes"], "detect_writes");
  return asked;
}

Dict report_of(const ExchangeResult& exchange) {
  const ExchangeReport& report = exchange.report();
  nb::dict dict;
  dict["route"] = std::string(to_string(report.route));
  dict["reason"] = report.reason;
  dict["payload_bytes"] = report.payload_bytes;
  dict["arena_bytes"] = report.arena_bytes;
  dict["network_bytes"] = report.network_bytes;
  dict["pool_bytes"] = report.pool_bytes;
  dict["rounds"] = report.rounds;
  nb::list phases;
  for (const PhaseReport& phase : report.phases) {
    nb::dict each;
    each["name"] = phase.name;
    each["seconds"] = phase.seconds;
    each["bytes"] = phase.bytes;
    phases.append(each);
  }
  dict["phases"] = phases;
  return dict;
}

nb::object object_of_entry(const Config& value) {
  return object_of(value);
}
nb::object object_of_entry(const Tensor& value) {
  return nb::cast(value);
}

/// Returns (exchange, entries).
template <class T>
nb::object python_of(GatherResult<T> gathered) {
  nb::list entries;
  for (std::size_t i = 0; i < gathered.size(); ++i) {
    const std::optional<T>& entry = gathered[i];
    entries.append(entry ? object_of_entry(*entry) : nb::none());
  }
  gathered.release();
  return nb::make_tuple(ExchangeResult(std::move(gathered)), entries);
}
/// Returns (exchange, tensor or None).
nb::object python_of(MergeResult merged) {
  const nb::object result = merged.tensor() ? nb::cast(*merged.tensor()) : nb::none();
  merged.release();
  return nb::make_tuple(ExchangeResult(std::move(merged)), result);
}

/// A gather that runs in the background. get() waits, and returns the result of the blocking call.
struct GatherWork {
  std::function<nb::object()> get;
};
template <class Result>
nb::object python_of(Work<Result> work) {
  const auto kept = std::make_shared<Work<Result>>(std::move(work));
  return nb::cast(GatherWork{[kept] { return python_of(without_gil([&] { return kept->get(); })); }});
}

// The calls below run in the background if there is a `stop`.

Any get_configs(nb::handle value, nb::handle ranks, Group& group, const Dict& options, const std::stop_source* stop) {
  std::optional<Config> config;
  const Asked call = arguments_of(GatherKind::configs, group, stop, [&] {
    if (!value.is_none()) config = config_of(value, Devices::accepted);
    return asked(ranks, options, stop);
  });
  const RankList list = list_of(call.ranks);
  if (stop != nullptr)
    return python_of(without_gil([&] { return get_configs_async(std::move(config), list, group, call.options); }));
  return python_of(
      without_gil([&] { return get_configs_parallel(config ? &*config : nullptr, list, group, call.options); }));
}

Any get_tensors(nb::handle value, nb::handle ranks, Group& group, const Dict& options, const std::stop_source* stop) {
  Tensor tensor;
  const Asked call = arguments_of(GatherKind::tensors, group, stop, [&] {
    tensor = tensor_of(value, Devices::accepted);
    return asked(ranks, options, stop);
  });
  const RankList list = list_of(call.ranks);
  if (stop != nullptr)
    return python_of(without_gil([&] { return get_tensors_async(std::move(tensor), list, group, call.options); }));
  return python_of(without_gil([&] { return gather::get_tensors(tensor, list, group, call.options); }));
}

/// Converts a muster.merge.Merge, a tuple of a name, a dimension and blocks.
Merge merge_of(nb::handle given) {
  const auto merge = nb::isinstance<nb::tuple>(given) ? nb::borrow<nb::tuple>(given) : nb::tuple();
  if (merge.size() != 3 || !nb::isinstance<nb::str>(merge[0]))
    throw Error(ErrorKind::invalid_argument,
                fmt::format("merge: {} is not a merge: pass muster.merge.concat(0), muster.merge.sum or another one",
                            nb::repr(given).c_str()));
  const auto name = argument_of<std::string>(merge[0], "merge");
  if (name == "concat")
    return merge::Concat{argument_of<std::int64_t>(merge[1], "dim of merge.concat"),
                         argument_of<std::vector<std::int64_t>>(merge[2], "blocks of merge.concat")};
  for (const Merge& each : {merge::same(), merge::first(), merge::max(), merge::sum(), merge::stack()})
    if (merge_name(each) == name) return each;
  throw Error(ErrorKind::invalid_argument, fmt::format("merge: unknown merge '{}'", name));
}

Any merge_tensor(nb::handle value, nb::handle merge, nb::handle ranks, Group& group, const Dict& options,
                 const std::stop_source* stop) {
  Tensor tensor;
  Merge kind;
  const Asked call = arguments_of(GatherKind::merge, group, stop, [&] {
    tensor = tensor_of(value, Devices::accepted);
    kind = merge_of(merge);
    return asked(ranks, options, stop);
  });
  const RankList list = list_of(call.ranks);
  if (stop != nullptr)
    return python_of(
        without_gil([&] { return merge_tensor_async(std::move(tensor), kind, list, group, call.options); }));
  return python_of(without_gil([&] { return gather::merge_tensor(tensor, kind, list, group, call.options); }));
}

nb::object object_of_part(const LayerPart& part) {
  nb::list configs;
  for (const auto& config : part.configs) configs.append(config ? object_of(*config) : nb::none());
  nb::list slices;
  for (const TensorSlice& slice : part.slices) {
    nb::dict each;
    each["rank"] = slice.rank;
    each["path"] = slice.path;
    each["dtype"] = std::string(to_string(slice.tensor.dtype));
    each["shape"] = nb::tuple(nb::cast(slice.tensor.shape));
    each["offset"] = slice.offset;
    each["elements"] = slice.elements;
    slices.append(each);
  }
  nb::list tensors;
  for (const LayerTensor& tensor : part.tensors) {
    nb::dict each;
    each["rank"] = tensor.rank;
    each["path"] = tensor.path;
    each["dtype"] = std::string(to_string(tensor.whole.dtype));
    each["shape"] = nb::tuple(nb::cast(tensor.whole.shape));
    tensors.append(each);
  }
  return nb::make_tuple(part.layer, part.part, part.num_parts, nb::cast(part.ranks), configs, slices, tensors);
}

/// `background`: the stop source of a call in the background, else null.
std::pair<Ranks, StreamOptions> stream_arguments(nb::handle ranks, Group& group, const Dict& options,
                                                 const std::stop_source* background) {
  return arguments_of(GatherKind::stream, group, background, [&] {
    StreamOptions given;
    given.memory_budget = bytes_of(options["memory_budget"]);
    given.pipeline_depth = argument_of<int>(options["pipeline_depth"], "pipeline_depth");
    given.route = route_named(argument_of<std::string>(options["route"], "route"));
    given.timeout = timeout_of(argument_of<std::optional<double>>(options["timeout"], "timeout"));
    given.workspace.path = path_of(options["workspace_path"]);
    given.workspace.zstd_level = argument_of<std::optional<int>>(options["zstd_level"], "zstd_level");
    given.debug.detect_writes = argument_of<bool>(options["detect_writes"], "detect_writes");
    return std::pair(argument_of<Ranks>(ranks, "ranks"), std::move(given));
  });
}

/// The functions of a stream. `source()` returns a tuple of one _core.Config, or None at the end; `consume(...)`
/// receives a part.
struct StreamFunctions {
  nb::object source;
  nb::object consume;

  StreamFunctions(Function its_source, Function its_consume)
      : source(std::move(its_source)), consume(std::move(its_consume)) {}
  StreamFunctions& operator=(StreamFunctions&&) = delete;
  /// The last owner may be a thread of the library, which does not hold the GIL.
  ~StreamFunctions() {
    if (!source.is_valid()) return;
    const InPython in_python;
    release();
  }
  void release() noexcept {
    source.reset();
    consume.reset();
  }

  [[nodiscard]] std::optional<Config> next() const {
    return call_python([&]() -> std::optional<Config> {
      const nb::object layer = source();
      if (layer.is_none()) return std::nullopt;
      return nb::cast<Config>(layer[0]);
    });
  }
  void take(const LayerPart& part) const {
    call_python([&] { consume(object_of_part(part)); });
  }
};

nb::object python_of(const StreamReport& report) {
  nb::dict result;
  result["route"] = std::string(to_string(report.route));
  result["reason"] = report.reason;
  result["layers"] = report.layers;
  result["parts"] = report.parts;
  result["bytes"] = report.bytes;
  result["seconds"] = report.seconds;
  result["peak_slot_bytes"] = report.peak_slot_bytes;
  return result;
}

/// Both functions run on this thread.
Any stream(Function source, nb::handle ranks, Group& group, Function consume, const Dict& options,
           const std::stop_source& stop) {
  auto [list, given] = stream_arguments(ranks, group, options, nullptr);
  given.stop = stop.get_token();
  const StreamFunctions functions(std::move(source), std::move(consume));
  return python_of(without_gil([&] {
    return gather_each([&] { return functions.next(); }, list_of(list), group,
                       [&](LayerPart& part) { functions.take(part); }, given);
  }));
}

/// Both functions run on the thread of the group.
GatherWork stream_async(Function source, nb::handle ranks, Group& group, Function consume, const Dict& options,
                        const std::stop_source& stop) {
  auto [list, given] = stream_arguments(ranks, group, options, &stop);
  given.stop = stop.get_token();
  const auto functions = std::make_shared<StreamFunctions>(std::move(source), std::move(consume));
  const auto work = std::make_shared<Work<StreamReport>>(without_gil([&] {
    return gather_each_async([functions] { return functions->next(); }, list_of(list), group,
                             [functions](LayerPart& part) { functions->take(part); }, given);
  }));
  return {[work, functions]() -> nb::object {
    std::exception_ptr raised;
    StreamReport report;
    try {
      report = without_gil([&] { return work->get(); });
    } catch (...) {
      raised = std::current_exception();
    }
    // This thread holds the GIL. The thread of the group might release them only after the interpreter has ended.
    if (work->is_done()) functions->release();
    if (raised) std::rethrow_exception(raised);
    return python_of(report);
  }};
}

}  // namespace

void bind_gathers(nb::module_& module) {
  nb::class_<ExchangeResult>(module, "ExchangeResult")
      .def_prop_ro("ranks", &ExchangeResult::ranks)
      .def("explain", &ExchangeResult::explain)
      .def("report", report_of)
      .def("wait_released", [](const ExchangeResult& self, double timeout) {
        const auto longest = *timeout_of(timeout);
        return without_gil([&] { return self.wait_released(longest); });
      });
  nb::class_<GatherWork>(module, "GatherWork").def("get", [](const GatherWork& self) -> Any { return self.get(); });
  module.def("get_configs", get_configs, nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("get_tensors", get_tensors, nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("merge_tensor", merge_tensor, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
             nb::arg().none());
  nb::class_<Config>(module, "Config")
      .def(
          "__init__", [](Config* self, nb::handle value) { new (self) Config(config_of(value, Devices::accepted)); },
          nb::arg().none());
  nb::class_<std::stop_source>(module, "StopSource").def(nb::init<>()).def("request_stop", [](std::stop_source& self) {
    self.request_stop();
  });
  module.def("gather_each", stream, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
  module.def("gather_each_async", stream_async, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg());
  module.def("trim", [](Group& group) { return without_gil([&] { return trim(group); }); });
}

}  // namespace muster::python
