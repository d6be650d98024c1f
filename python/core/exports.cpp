// SPDX-License-Identifier: Apache-2.0
// Exports of shards in files and of tensors in the memory of ranks, their fingerprints, and the split of a model into
// shards.

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/export.hpp"
#include "muster/fingerprint.hpp"
#include "muster/live_export.hpp"
#include "python/core/arguments.hpp"
#include "python/core/bindings.hpp"
#include "python/core/live_parts.hpp"
#include "python/core/long_work.hpp"
#include "python/core/options.hpp"
#include "python/core/waiting.hpp"
#include "src/checkpoint/assembly/live_export.hpp"
#include "src/checkpoint/fingerprint.hpp"
#include "src/group/error_propagation.hpp"
#include "src/group/watchdog.hpp"
#include "src/inspect/reports.hpp"
#include "src/os/clock.hpp"

namespace muster::python {
namespace {

Dict dict_of(const Fingerprint& fingerprint) {
  nb::dict dict = nb::cast<nb::dict>(object_of(inspect::fingerprint_tree(fingerprint)));
  dict["text"] = fingerprint.text();
  return dict;
}

nb::list skipped_of(const Omissions& files) {
  nb::list list;
  for (const Omission& file : files) list.append(nb::make_tuple(file.name, file.reason));
  return list;
}

nb::object shard(const std::string& model, const std::string& out, const std::string& layout, const std::string& plan,
                 const Dict& given, nb::handle progress) {
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

ExportOptions export_options_of(const Dict& given) {
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
  options.take("fingerprint", made.fingerprint);
  options.take("job_id", made.job_id);
  options.take("step", made.step);
  options.take("key", made.key);
  options.take("file_pattern", made.file_pattern);
  options.take("extra_files", made.extra_files);
  options.take("files", made.files);
  options.take("check_replicas", made.check_replicas);
  options.take("stale_after", made.stale_after);
  if (!writers) return made;
  if (writers != to_string(Writers::rank0) && writers != to_string(Writers::all))
    throw Error(ErrorKind::invalid_argument,
                fmt::format("writers: unknown value '{}' (expected 'rank0' or 'all')", *writers));
  made.writers = writers == to_string(Writers::rank0) ? Writers::rank0 : Writers::all;
  return made;
}

Dict report_of(const ExportReport& report, const Group& group) {
  nb::dict result;
  if (group.rank() != 0) return result;
  result["manifest"] = object_of(inspect::account_tree(report.manifest));
  result["files_resumed"] = report.files_resumed;
  result["bytes_resumed"] = report.bytes_resumed;
  result["writers"] = std::string(to_string(report.writers));
  result["bytes_written"] = nb::cast(report.bytes_written);
  result["skipped"] = skipped_of(report.skipped);
  result["seconds"] = report.seconds;
  if (report.fingerprint) result["fingerprint"] = dict_of(*report.fingerprint);
  return result;
}

/// Runs a blocking export of any source: call(options).
template <class Call>
Dict exported(Group& group, ExportOptions options, nb::handle progress, const Call& call, std::launch where) {
  const auto work = [&](const ProgressCallback& tell, std::stop_token stop) {
    options.progress = tell;
    options.stop = std::move(stop);
    return call(std::as_const(options));
  };
  // MPI may be restricted to the main thread.
  return report_of(long_work(progress, work, group.kind() == "mpi" ? std::launch::deferred : where), group);
}

Dict export_shards(const std::string& shards, const std::string& out, const std::string& plan, Group& group,
                   const Dict& given, nb::handle progress) {
  // The other ranks are already waiting for this rank.
  const ExportOptions made = group::or_fail(group, [&] { return export_options_of(given); });
  const auto call = [&](const ExportOptions& options) { return export_model(shards, out, plan, group, options); };
  return exported(group, made, progress, call, std::launch::async);
}

/// The arguments of a live export.
struct LiveArguments {
  ExportOptions options;
  std::vector<TensorPart> parts;
};

/// Returns make(). If it fails, every rank raises its error, and the group remains usable.
template <class Make>
auto made_for_export(Group& group, ExportForm form, const Make& make) -> decltype(make()) {
  return made_or_refused(make, [&](const Error& failure) { refuse_export(group, failure, form); });
}

LiveArguments live_arguments_of(nb::handle state, Group& group, ExportForm form, const Dict& given) {
  return made_for_export(group, form, [&] {
    std::vector<TensorPart> parts = live_parts_of(state);
    return LiveArguments{export_options_of(given), std::move(parts)};
  });
}

Dict export_tensors(nb::handle state, const std::string& out, const std::string& plan, Group& group, const Dict& given,
                    nb::handle progress) {
  const LiveArguments live = live_arguments_of(state, group, ExportForm::blocking, given);
  const auto call = [&](const ExportOptions& options) { return export_model(live.parts, out, plan, group, options); };
  return exported(group, live.options, progress, call, std::launch::async);
}

/// `next()` returns the parts of the next unit as a list, or None at the end. It runs on this thread.
Dict export_units(Function next, const std::string& out, const std::string& plan, Group& group, const Dict& given,
                  nb::handle progress) {
  const ExportOptions made = made_for_export(group, ExportForm::blocking, [&] { return export_options_of(given); });
  const PartSource units = [&] {
    return call_python([&]() -> std::optional<std::vector<TensorPart>> {
      const nb::object unit = next();
      if (unit.is_none()) return std::nullopt;
      return parts_of(unit);
    });
  };
  const auto call = [&](const ExportOptions& options) { return export_model(units, out, plan, group, options); };
  return exported(group, made, progress, call, std::launch::deferred);
}

Dict fingerprint_tensors(nb::handle state, Group& group, const Dict& given, nb::handle progress) {
  struct Arguments {
    FingerprintOptions options;
    std::vector<TensorPart> parts;
  };
  Arguments made = made_or_refused(
      [&] {
        Arguments arguments;
        const Options options(given);
        options.take("select", arguments.options.select);
        options.take("exclude", arguments.options.exclude);
        options.take("plan", arguments.options.plan);
        options.take("base_model", arguments.options.base_model);
        options.take("dtype", arguments.options.dtype);
        options.take("cast_all", arguments.options.cast_all);
        options.take("source_layout", arguments.options.source_layout);
        options.take("key", arguments.options.key);
        options.take("file_pattern", arguments.options.file_pattern);
        options.take("rank", arguments.options.rank);
        options.take("step", arguments.options.step);
        options.take("job_id", arguments.options.job_id);
        arguments.parts = live_parts_of(state);
        return arguments;
      },
      [&](const Error& failure) { refuse_fingerprint(group, failure); });
  const auto work = [&](const ProgressCallback& tell, std::stop_token stop) {
    made.options.progress = tell;
    made.options.stop = std::move(stop);
    return fingerprint(made.parts, group, made.options);
  };
  return dict_of(long_work(progress, work, group.kind() == "mpi" ? std::launch::deferred : std::launch::async));
}

/// An export that runs while the program continues. It keeps the group alive.
class ExportWork {
 public:
  ExportWork(nb::handle state, const std::string& out, const std::string& plan, std::shared_ptr<Group> group,
             const Dict& given, nb::handle progress)
      : group_(std::move(group)), telling_(std::make_shared<Telling>(progress)) {
    LiveArguments live = live_arguments_of(state, *group_, ExportForm::asynchronous, given);
    live.options.progress = Telling::callback(telling_);
    live.options.stop = telling_->stop_token();
    work_ = without_gil([&] { return export_model_async(live.parts, out, plan, *group_, live.options); });
  }

  [[nodiscard]] bool is_done() const { return work_.is_done(); }
  [[nodiscard]] bool wait(double seconds) const {
    const os::Clock::time_point end = os::Clock::now() + *timeout_of(seconds);
    return without_gil([&] {
      for (;;) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - os::Clock::now());
        if (work_.wait_for(std::clamp(left, left.zero(), group::Watchdog::slice))) return true;
        if (left <= left.zero() || group::is_interrupted()) return false;
      }
    });
  }
  Dict get() {
    return report_of(telling_->finish([&](auto time) { return work_.wait_for(time); }, [&] { return work_.get(); }),
                     *group_);
  }
  void cancel() { telling_->request_stop(); }

 private:
  std::shared_ptr<Group> group_;
  std::shared_ptr<Telling> telling_;
  Work<ExportReport> work_;
};

}  // namespace

void bind_exports(nb::module_& module) {
  module.def("shard_model", shard, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("export_shards", export_shards, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("export_tensors", export_tensors, nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg().none());
  module.def("fingerprint_tensors", fingerprint_tensors, nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none());
  module.def("export_units", export_units, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  module.def(
      "begin_export",
      [](nb::handle state, const std::string& out, const std::string& plan, std::shared_ptr<Group> group,
         const Dict& given, nb::handle progress) {
        return std::make_unique<ExportWork>(state, out, plan, std::move(group), given, progress);
      },
      nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  nb::class_<ExportWork>(module, "ExportWork", "An export that runs while the program continues.")
      .def("is_done", &ExportWork::is_done, "Returns whether the export has ended. It does not wait.")
      .def("wait", &ExportWork::wait, nb::arg("timeout"),
           "Waits until the export has ended, for at most `timeout` seconds. Returns whether it has ended.")
      .def("get", &ExportWork::get,
           R"(Waits until the export has ended. Returns its report or raises its error, on all ranks. Call it once.

Ctrl-C during the wait cancels the export on all ranks.)")
      .def(
          "__await__", [](nb::handle self) { return nb::module_::import_("muster._futures").attr("await_work")(self); },
          nb::sig("def __await__(self) -> collections.abc.Generator[typing.Any, None, dict[str, typing.Any]]"))
      .def("cancel", &ExportWork::cancel, "Requests the end of the export on all ranks. Its output is deleted.");
  module.def("plan_export", [](const std::string& shards, const std::string& plan, const Dict& given) {
    const ExportOptions options = export_options_of(given);
    return object_of(inspect::account_tree(without_gil([&] { return plan_export(shards, plan, options); })));
  });
}

}  // namespace muster::python
