// SPDX-License-Identifier: Apache-2.0
// State files, workspaces, safetensors files, shards of a model in memory, and the reports of the program `muster`.

#include <fmt/ranges.h>

#include <cstdint>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/load_shard.hpp"
#include "muster/progress.hpp"
#include "muster/safetensors.hpp"
#include "muster/state.hpp"
#include "muster/state_file.hpp"
#include "muster/verify.hpp"
#include "muster/workspace.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/long_work.hpp"
#include "python/core/options.hpp"
#include "python/core/waiting.hpp"
#include "src/checkpoint/fingerprint.hpp"
#include "src/group/error_propagation.hpp"
#include "src/inspect/reports.hpp"
#include "src/inspect/show.hpp"
#include "src/report/report.hpp"

namespace muster::python {
namespace {

std::vector<NamedTensor> weights_of(nb::handle weights) {
  std::vector<NamedTensor> named;
  if (weights.is_none()) return named;
  if (!nb::isinstance<nb::dict>(weights)) refuse_argument(weights, "the tensors", "a dict");
  for (const auto& [name, tensor] : nb::borrow<nb::dict>(weights))
    named.emplace_back(argument_of<std::string>(name, "a tensor's name"), tensor_of(tensor));
  return named;
}

Dict dict_of(const std::vector<NamedTensor>& weights) {
  nb::dict dict;
  for (const auto& [name, tensor] : weights) dict[text_object(name)] = nb::cast(tensor);
  return dict;
}

nb::object pair_of(const State& state) {
  return nb::make_tuple(object_of(state.config), dict_of(state.weights));
}

void bind_states(nb::module_& module) {
  module.def(
      "split", [](nb::handle config) { return pair_of(split(config_of(config))); }, nb::arg().none());
  module.def(
      "join",
      [](nb::handle config, nb::handle weights) {
        return object_of(join({.config = config_of(config), .weights = weights_of(weights)}));
      },
      nb::arg().none(), nb::arg().none());
  module.def(
      "write_state_file",
      [](const std::string& path, nb::handle config, nb::handle weights, int rank, int world_size, std::uint64_t step,
         std::optional<int> zstd_level, bool durable, nb::handle progress) {
        State state{.config = config_of(config), .weights = weights_of(weights)};
        if (weights.is_none()) state = split(state.config);
        StateFileOptions options{.zstd_level = zstd_level, .durable = durable};
        options.info.step = step;
        options.info.rank = rank;
        options.info.world_size = world_size;
        long_work(progress, [&](const ProgressCallback& tell, const std::stop_token& stop) {
          write_state_file(path, state.config, state.weights, options, ended_by(tell, stop, "writing " + path));
          return true;
        });
      },
      nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
      nb::arg().none());
  module.def("read_state_file", [](const std::string& path) -> Objects {
    std::optional<StateFileInfo> info;
    const State state = without_gil([&] {
      const StateFile file = StateFile::open(path);
      info = file.info();
      return file.load();
    });
    nb::dict writer;
    writer["rank"] = info->rank;
    writer["world_size"] = info->world_size;
    writer["step"] = info->step;
    return nb::make_tuple(object_of(state.config), dict_of(state.weights), writer);
  });
}

void bind_workspaces(nb::module_& module) {
  nb::class_<Workspace>(module, "Workspace")
      .def(
          "__init__",
          [](Workspace* self, const std::optional<std::string>& path, std::shared_ptr<Group> group,
             std::optional<int> zstd_level, bool durable, int steps_kept, std::optional<double> timeout) {
            const WorkspaceOptions options{
                .zstd_level = zstd_level, .durable = durable, .steps_kept = steps_kept, .timeout = timeout_of(timeout)};
            new (self) Workspace(without_gil([&] { return Workspace(path, group, options); }));
          },
          nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none())
      .def_prop_ro("path", &Workspace::path)
      .def_prop_ro("is_initialized", &Workspace::is_initialized)
      .def(
          "write",
          [](Workspace& self, nb::handle config, nb::handle weights, std::optional<std::uint64_t> step) {
            const Config tree = config_of(config);
            const std::vector<NamedTensor> named = weights_of(weights);
            return without_gil([&] { return self.write_configs_and_weights(tree, named, step); });
          },
          nb::arg().none(), nb::arg().none(), nb::arg().none())
      .def(
          "read",
          [](Workspace& self, int rank, std::uint64_t min_step, std::optional<std::uint64_t> step, bool on_all_ranks,
             bool newest) -> nb::object {
            const WorkspaceQuery query{.min_step = min_step,
                                       .step = step,
                                       .on_all_ranks = on_all_ranks,
                                       .job = newest ? WorkspaceJob::newest : WorkspaceJob::own};
            const auto state = without_gil([&] { return self.read_configs_and_weights_from_rank(rank, query); });
            if (!state) return nb::none();
            nb::dict writer;
            writer["step"] = state->step;
            writer["path"] = state->path;
            writer["world_size"] = state->world_size;
            return nb::make_tuple(object_of(state->state.config), dict_of(state->state.weights), writer);
          },
          nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg());
}

void bind_safetensors(nb::module_& module) {
  module.def("load_safetensors", [](const std::string& path) -> Objects {
    std::vector<NamedTensor> tensors;
    const SafetensorsFile file = without_gil([&] {
      SafetensorsFile open = SafetensorsFile::open(path);
      for (std::size_t i = 0; i < open.tensors().size(); ++i)
        tensors.emplace_back(open.tensors()[i].name, open.tensor(i));
      return open;
    });
    nb::dict metadata;
    for (const auto& [key, value] : file.metadata()) metadata[text_object(key)] = text_object(value);
    return nb::make_tuple(dict_of(tensors), metadata);
  });
  module.def(
      "save_safetensors",
      [](const std::string& path, nb::handle tensors, nb::handle metadata) {
        const std::vector<NamedTensor> named = weights_of(tensors);
        std::vector<TensorEntry> entries;
        entries.reserve(named.size());
        for (const auto& [name, tensor] : named)
          entries.push_back({.name = name, .dtype = tensor.dtype(), .shape = tensor.shape()});
        std::map<std::string, std::string> texts;
        if (!metadata.is_none()) texts = texts_of(metadata, "metadata");
        without_gil([&] {
          SafetensorsWriter writer(path, std::move(entries), std::move(texts));
          for (const auto& [name, tensor] : named) writer.write(name, tensor.view());
          writer.commit();
        });
      },
      nb::arg(), nb::arg(), nb::arg().none());
}

SourceOptions source_options_of(const Dict& given) {
  const Options options(given);
  SourceOptions made;
  options.take("plan", made.plan);
  options.take("key", made.thirdparty.key);
  options.take("file_pattern", made.thirdparty.file_pattern);
  options.take("base_model", made.base_model);
  options.take("rank", made.states.rank);
  options.take("step", made.states.step);
  options.take("job_id", made.states.job);
  return made;
}

TensorFilter filter_of(const Dict& given) {
  const Options options(given);
  TensorFilter filter;
  options.take("select", filter.select);
  options.take("exclude", filter.exclude);
  return filter;
}

nb::object load_shard_of(const std::string& model, const std::string& layout, int rank, const std::string& plan,
                         const Dict& given, nb::handle group, nb::handle progress) {
  LoadShardOptions made;
  const auto ranks = group.is_none() ? nullptr : group_of(group);
  const auto arguments = [&] {
    const Options options(given);
    options.take("key", made.key);
    options.take("file_pattern", made.file_pattern);
    options.take("source_layout", made.source_layout);
    options.take("base_model", made.base_model);
    options.take("to_plan", made.to_plan);
    return ParallelLayout::parse(layout);
  };
  // The other ranks of a group are already waiting.
  const ParallelLayout cut = ranks ? group::or_fail(*ranks, arguments) : arguments();
  return dict_of(long_work(progress, [&](const ProgressCallback& tell, std::stop_token stop) {
    made.progress = tell;
    made.stop = std::move(stop);
    return ranks ? load_shard(model, cut, rank, plan, *ranks, made) : load_shard(model, cut, rank, plan, made);
  }));
}

void bind_checkpoints(nb::module_& module) {
  module.def("load_shard", load_shard_of, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg().none());
  module.def(
      "verify",
      [](const std::string& path, const Dict& given, nb::handle progress) {
        VerifyOptions made;
        const Options options(given);
        options.take("checksums", made.checksums);
        options.take("key", made.key);
        options.take("file_pattern", made.file_pattern);
        options.take("plan", made.plan);
        options.take("base_model", made.base_model);
        options.take("source_layout", made.source_layout);
        const TensorFilter filter = filter_of(given);
        made.select = filter.select;
        made.exclude = filter.exclude;
        const auto work = [&](const ProgressCallback& tell, const std::stop_token& stop) {
          made.progress = ended_by(tell, stop, "verifying " + path);
          return verify(path, made);
        };
        return object_of(inspect::verify_tree(long_work(progress, work)));
      },
      nb::arg(), nb::arg(), nb::arg().none());
  module.def("diff", [](const std::string& a, const std::string& b, const Dict& given) {
    const SourceOptions options = source_options_of(given);
    const TensorFilter filter = filter_of(given);
    return object_of(without_gil([&] { return inspect::diff_models(a, b, options, filter); }));
  });
  module.def(
      "fingerprint",
      [](const std::string& path, const Dict& given, nb::handle progress) {
        SourceOptions request = source_options_of(given);
        const TensorFilter filter = filter_of(given);
        request.path = path;
        request.select = filter.select;
        request.exclude = filter.exclude;
        const Options options(given);
        options.take("dtype", request.dtype);
        options.take("cast_all", request.cast_all);
        options.take("source_layout", request.source_layout);
        const auto work = [&](const ProgressCallback& tell, const std::stop_token& stop) {
          return fingerprint_of(request, tell, stop);
        };
        const Fingerprint found = long_work(progress, work);
        nb::object result = object_of(inspect::fingerprint_tree(path, found));
        result["text"] = found.text();
        return result;
      },
      nb::arg(), nb::arg(), nb::arg().none());
  module.def(
      "report",
      [](const std::vector<std::string>& paths, const Dict& given, nb::handle progress) {
        report::ReportOptions made{.source = source_options_of(given), .filter = filter_of(given)};
        const Options options(given);
        options.take("diff", made.is_diff);
        options.take("values", made.has_values);
        options.take("checksums", made.has_checksums);
        options.take("bins", made.bins);
        options.take("layout", made.layout);
        options.take("source_layout", made.source.source_layout);
        return long_work(progress, [&](const ProgressCallback& tell, const std::stop_token& stop) {
          made.progress = ended_by(tell, stop, "reading " + fmt::format("{}", fmt::join(paths, ", ")));
          return report::report_page(report::report_tree(paths, made));
        });
      },
      nb::arg(), nb::arg(), nb::arg().none());
  module.def("show", [](const std::string& path, const Dict& given) {
    const SourceOptions options = source_options_of(given);
    const inspect::ShowOptions wanted{.filter = filter_of(given)};
    return object_of(without_gil([&] {
      std::string text;
      inspect::show_json(open_source(path, options), wanted, [&](std::string_view piece) { text += piece; });
      return parse_json(text);
    }));
  });
}

}  // namespace

void bind_files(nb::module_& module) {
  bind_states(module);
  bind_workspaces(module);
  bind_safetensors(module);
  bind_checkpoints(module);
}

}  // namespace muster::python
