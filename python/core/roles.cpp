// SPDX-License-Identifier: Apache-2.0
// muster.compat.torchgfn: the layout of roles, averages over models, and reports.

#include <nanobind/stl/pair.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/compat/roles.hpp"
#include "muster/trace.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/process_groups.hpp"
#include "python/core/waiting.hpp"
#include "src/compat/roles.hpp"

namespace muster::python {
namespace {

nb::dict layout_of(Group& group, const nb::callable& sizes) {
  std::optional<Error> trouble;
  roles::RoleSizes wanted;
  try {
    wanted = converted([&] {
      const nb::object given = sizes();
      return roles::RoleSizes{argument_of<int>(given[0], "num_remote_buffers"),
                              argument_of<int>(given[1], "num_agent_groups"),
                              argument_of<bool>(given[2], "use_coordinator")};
    });
  } catch (const Error& error) {
    trouble = error;
  }
  const roles::RankLayout layout = without_gil([&] {
    group::inside(group).agree(trouble, {});
    return roles::agreed_layout(group, wanted);
  });
  const int rank = group.rank();
  nb::dict result;
  result["training_ranks"] = layout.training_ranks;
  result["buffer_ranks"] = layout.buffer_ranks;
  result["coordinator_rank"] = layout.coordinator_rank;
  result["agent_groups"] = layout.agent_groups;
  result["agent_group_id"] = layout.agent_group_id(rank);
  result["agent_group_size"] = layout.agent_group_size();
  result["assigned_buffer"] = layout.assigned_buffer(rank);
  result["assigned_training_ranks"] = layout.assigned_training_ranks(rank);
  return result;
}

/// `parameters`: (name, tensor or None) of each parameter.
void average(ProcessGroup& group, nb::handle parameters, bool of_gradients) {
  const auto make = [&] {
    std::vector<roles::Parameter> model;
    for (const nb::handle each : nb::iter(parameters)) {
      roles::Parameter& made = model.emplace_back(argument_of<std::string>(each[0], "model"));
      if (each[1].is_none()) continue;
      if (of_gradients)
        made.gradient = tensor_of(each[1]);
      else
        made.value = tensor_of(each[1]);
    }
    return model;
  };
  const auto model = made_in(group, make);
  without_gil([&] { of_gradients ? roles::average_gradients(model, group) : roles::average_models(model, group); });
}

/// `times`: for each rank, a dict of the durations of each step.
std::vector<RankTimes> times_of(nb::handle times) {
  return converted([&] {
    std::vector<RankTimes> ranks;
    for (const nb::handle rank : nb::iter(times)) {
      RankTimes& made = ranks.emplace_back();
      for (const auto& [step, seconds] : nb::cast<nb::dict>(rank)) {
        auto name = argument_of<std::string>(step, "all_timing_dict");
        auto values = argument_of<std::vector<double>>(seconds, name.c_str());
        made.push_back({std::move(name), std::move(values)});
      }
    }
    return ranks;
  });
}

}  // namespace

void bind_roles(nb::module_& module) {
  module.def(
      "role_layout", layout_of, nb::arg("group"), nb::arg("sizes"),
      nb::sig(
          "def role_layout(group: Group, sizes: typing.Callable[[], tuple[int, int, bool]]) -> dict[str, typing.Any]"));
  module.def("average", average, nb::arg("group"), nb::arg("parameters"), nb::arg("of_gradients"));
  module.def("report_load_imbalance", [](nb::handle times) {
    ImbalanceReport report = report_load_imbalance(times_of(times));
    const std::vector<std::string> warnings = std::exchange(report.warnings, {});
    return std::pair(to_string(report), warnings);
  });
  module.def("report_time_info", [](nb::handle times) { return to_string(report_time_info(times_of(times))); });
}

}  // namespace muster::python
