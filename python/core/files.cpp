// SPDX-License-Identifier: Apache-2.0
// State files, workspaces, safetensors files, checkpoints, and the reports of the program `muster`.

#include <fmt/core.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "muster/dtype.hpp"
#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/load_shard.hpp"
#include "muster/progress.hpp"
#include "muster/safetensors.hpp"
#include "muster/state.hpp"
#include "muster/state_file.hpp"
#include "muster/verify.hpp"
#include "muster/workspace.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"
#include "src/checkpoint/fingerprint.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/watchdog.hpp"
#include "src/inspect/reports.hpp"
#include "src/inspect/show.hpp"

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

nb::dict dict_of(const std::vector<NamedTensor>& weights) {
  nb::dict dict;
  for (const auto& [name, tensor] : weights) dict[text_object(name)] = nb::cast(tensor);
  return dict;
}

nb::object pair_of(const State& state) {
  return nb::make_tuple(object_of(state.config), dict_of(state.weights));
}

/// Runs long work on a separate thread, while the calling thread checks for Ctrl-C, which ends the work. `deferred`
/// runs it on the calling thread. `progress` is None, or is called with (bytes, total_bytes, seconds); an exception of
/// it also ends the work.
template <class Call>
auto long_work(nb::handle progress, const Call& call, std::launch where = std::launch::async) {
  std::stop_source stop;
  std::optional<nb::python_error> raised;
  ProgressCallback tell;
  if (!progress.is_none())
    tell = [&](const Progress& now) {
      const InPython in_python;
      if (raised) return;
      try {
        progress(now.bytes, now.total_bytes, now.seconds);
      } catch (nb::python_error& error) {
        // This may be a thread on which nothing may be thrown.
        raised.emplace(std::move(error));
        stop.request_stop();
      }
    };
  const auto end = [&] {
    if (raised) throw nb::python_error(std::move(*raised));
  };
  try {
    auto result = without_gil([&] {
      auto work = std::async(where, [&] { return call(tell, stop.get_token()); });
      while (work.wait_for(std::chrono::milliseconds(60)) == std::future_status::timeout)
        if (group::is_interrupted()) stop.request_stop();
      return work.get();
    });
    end();
    return result;
  } catch (const Error&) {
    end();
    throw;
  }
}

/// The progress callback for work without a stop token: if `tell` requests the end, the work ends with an exception
/// about `what`.
ProgressCallback ended_by(const ProgressCallback& tell, const std::stop_token& stop, std::string what) {
  return [&tell, stop, what = std::move(what)](const Progress& now) {
    if (tell) tell(now);
    if (stop.stop_requested()) throw Error(ErrorKind::cancelled, what + ": interrupted");
  };
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
  module.def("read_state_file", [](const std::string& path) {
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
  module.def("load_safetensors", [](const std::string& path) {
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
        if (!metadata.is_none() && !nb::isinstance<nb::dict>(metadata)) refuse_argument(metadata, "metadata", "a dict");
        if (!metadata.is_none())
          for (const auto& [key, value] : nb::borrow<nb::dict>(metadata))
            texts[argument_of<std::string>(key, "metadata")] = argument_of<std::string>(value, "metadata");
        without_gil([&] {
          SafetensorsWriter writer(path, std::move(entries), std::move(texts));
          for (const auto& [name, tensor] : named) writer.write(name, tensor.view());
          writer.commit();
        });
      },
      nb::arg(), nb::arg(), nb::arg().none());
}

nb::list skipped_of(const Omissions& files) {
  nb::list list;
  for (const Omission& file : files) list.append(nb::make_tuple(file.name, file.reason));
  return list;
}

/// Sets options by their C++ names; options that are not given keep their values.
class Options {
 public:
  explicit Options(const nb::dict& given) : given_(given) {}

  template <class Value>
  void take(const char* name, Value& value) const {
    read(name, [&](nb::handle object) { value = nb::cast<Value>(object); });
  }
  void take(const char* name, ParallelLayout& value) const {
    read(name, [&](nb::handle object) { value = ParallelLayout::parse(nb::cast<std::string>(nb::str(object))); });
  }
  void take(const char* name, std::chrono::seconds& value) const {
    read(name,
         [&](nb::handle object) { value = std::chrono::seconds(static_cast<std::int64_t>(nb::cast<double>(object))); });
  }
  void take(const char* name, DType& value) const {
    read(name, [&](nb::handle object) { value = dtype_of(object); });
  }
  template <class Value>
  void take(const char* name, std::optional<Value>& value) const {
    if (given_.contains(name) && !given_[name].is_none()) take(name, value.emplace());
  }
  void take_bytes(const char* name, std::uint64_t& value) const {
    read(name, [&](nb::handle object) { value = bytes_of(object); });
  }

 private:
  template <class Read>
  void read(const char* name, const Read& read) const {
    if (!given_.contains(name)) return;
    try {
      read(given_[name]);
    } catch (nb::python_error& error) {
      throw error_of(error, ErrorKind::invalid_argument);
    } catch (const nb::cast_error&) {
      throw Error(ErrorKind::invalid_argument, fmt::format("{}: the value does not have the expected type", name));
    }
  }

  const nb::dict& given_;
};

SourceOptions source_options_of(const nb::dict& given) {
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

TensorFilter filter_of(const nb::dict& given) {
  const Options options(given);
  TensorFilter filter;
  options.take("select", filter.select);
  options.take("exclude", filter.exclude);
  return filter;
}

nb::object shard(const std::string& model, const std::string& out, const std::string& layout, const std::string& plan,
                 const nb::dict& given, nb::handle progress) {
  ShardOptions made;
  const Options options(given);
  options.take("force", made.force);
  options.take("to_workspace", made.to_workspace);
  options.take("zstd_level", made.zstd_level);
  options.take("extra_files", made.extra_files);
  options.take("select", made.select);
  options.take("exclude", made.exclude);
  options.take("source_layout", made.source_layout);
  options.take("key", made.key);
  options.take("file_pattern", made.file_pattern);
  options.take("job_id", made.job_id);
  options.take("step", made.step);
  options.take("base_model", made.base_model);
  options.take("to_plan", made.to_plan);
  options.take("stale_after", made.stale_after);
  options.take("dry_run", made.dry_run);
  const ShardReport report = long_work(progress, [&](const ProgressCallback& tell, std::stop_token stop) {
    made.progress = tell;
    made.stop = std::move(stop);
    return shard_model(model, out, ParallelLayout::parse(layout), plan, made);
  });
  nb::dict result;
  result["tensors"] = report.tensors;
  result["bytes"] = report.bytes;
  result["bytes_written"] = report.bytes_written;
  result["job"] = report.job;
  result["skipped"] = skipped_of(report.skipped);
  result["notes"] = nb::cast(report.notes);
  result["seconds"] = report.seconds;
  return result;
}

nb::object load_shard_of(const std::string& model, const std::string& layout, int rank, const std::string& plan,
                         const nb::dict& given, nb::handle group, nb::handle progress) {
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

ExportOptions export_options_of(const nb::dict& given) {
  const Options options(given);
  ExportOptions made;
  std::optional<std::string> writers;
  options.take("force", made.force);
  options.take_bytes("max_shard_size", made.max_shard_size);
  options.take_bytes("memory_budget", made.memory_budget);
  options.take("writers", writers);
  options.take("source_layout", made.source_layout);
  options.take("target_layout", made.target_layout);
  options.take("to_plan", made.to_plan);
  options.take("dtype", made.dtype);
  options.take("cast_all", made.cast_all);
  options.take("resume", made.resume);
  options.take("base_model", made.base_model);
  options.take("select", made.select);
  options.take("exclude", made.exclude);
  options.take("checksums", made.checksums);
  options.take("job_id", made.job_id);
  options.take("step", made.step);
  options.take("key", made.key);
  options.take("file_pattern", made.file_pattern);
  options.take("extra_files", made.extra_files);
  options.take("stale_after", made.stale_after);
  if (!writers) return made;
  if (writers != to_string(Writers::rank0) && writers != to_string(Writers::all))
    throw Error(ErrorKind::invalid_argument,
                fmt::format("writers: unknown value '{}' (expected 'rank0' or 'all')", *writers));
  made.writers = writers == to_string(Writers::rank0) ? Writers::rank0 : Writers::all;
  return made;
}

nb::object export_shards(const std::string& shards, const std::string& out, const std::string& plan, Group& group,
                         const nb::dict& given, nb::handle progress) {
  // The other ranks are already waiting for this rank.
  ExportOptions options = group::or_fail(group, [&] { return export_options_of(given); });
  const auto work = [&](const ProgressCallback& tell, std::stop_token stop) {
    options.progress = tell;
    options.stop = std::move(stop);
    return export_model(shards, out, plan, group, options);
  };
  // MPI may be restricted to the main thread.
  const ExportReport report =
      long_work(progress, work, group.kind() == "mpi" ? std::launch::deferred : std::launch::async);
  nb::dict result;
  if (group.rank() != 0) return result;
  result["manifest"] = object_of(inspect::account_tree(report.manifest));
  result["files_resumed"] = report.files_resumed;
  result["bytes_resumed"] = report.bytes_resumed;
  result["writers"] = std::string(to_string(report.writers));
  result["bytes_written"] = nb::cast(report.bytes_written);
  result["skipped"] = skipped_of(report.skipped);
  result["seconds"] = report.seconds;
  return result;
}

void bind_checkpoints(nb::module_& module) {
  module.def("shard_model", shard, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("load_shard", load_shard_of, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg().none());
  module.def("export_model", export_shards, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("plan_export", [](const std::string& shards, const std::string& plan, const nb::dict& given) {
    const ExportOptions options = export_options_of(given);
    return object_of(inspect::account_tree(without_gil([&] { return plan_export(shards, plan, options); })));
  });
  module.def(
      "verify",
      [](const std::string& path, const nb::dict& given, nb::handle progress) {
        VerifyOptions made;
        const Options options(given);
        options.take("checksums", made.checksums);
        options.take("key", made.key);
        options.take("file_pattern", made.file_pattern);
        options.take("plan", made.plan);
        options.take("base_model", made.base_model);
        options.take("source_layout", made.source_layout);
        const auto work = [&](const ProgressCallback& tell, const std::stop_token& stop) {
          made.progress = ended_by(tell, stop, "verifying " + path);
          return verify(path, made);
        };
        return object_of(inspect::verify_tree(long_work(progress, work)));
      },
      nb::arg(), nb::arg(), nb::arg().none());
  module.def("diff", [](const std::string& a, const std::string& b, const nb::dict& given) {
    const SourceOptions options = source_options_of(given);
    const TensorFilter filter = filter_of(given);
    return object_of(without_gil([&] { return inspect::diff_models(a, b, options, filter); }));
  });
  module.def(
      "fingerprint",
      [](const std::string& path, const nb::dict& given, nb::handle progress) {
        SourceOptions request = source_options_of(given);
        const TensorFilter filter = filter_of(given);
        request.path = path;
        request.select = filter.select;
        request.exclude = filter.exclude;
        const Options options(given);
        options.take("dtype", request.dtype);
        options.take("cast_all", request.cast_all);
        const auto work = [&](const ProgressCallback& tell, const std::stop_token& stop) {
          return fingerprint_of(request, tell, stop);
        };
        return object_of(inspect::fingerprint_tree(path, long_work(progress, work)));
      },
      nb::arg(), nb::arg(), nb::arg().none());
  module.def("show", [](const std::string& path, const nb::dict& given) {
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
