// SPDX-License-Identifier: Apache-2.0
// Live exports: the steps of export_run.hpp over the tensors of the ranks.

#include "muster/live_export.hpp"

#include <fmt/format.h>

#include <memory>
#include <utility>

#include "muster/error.hpp"
#include "src/checkpoint/assembly/export_run.hpp"
#include "src/checkpoint/assembly/live_tensors.hpp"
#include "src/group/group.hpp"
#include "src/trace/span.hpp"

namespace muster {
namespace {

/// Throws Error(invalid_argument) that names an option which only exports of files have.
void check_live_options(const ExportOptions& options, const std::string& plan) {
  const auto refuse = [](const char* name, const char* words) {
    throw Error(ErrorKind::invalid_argument, fmt::format("export_model: {}: {}. Leave it out", name, words));
  };
  const char* const of_files = "it is for exports of files, not of tensors in memory";
  if (options.resume) refuse("resume", of_files);
  if (options.target_layout) refuse("target_layout", of_files);
  if (!options.to_plan.empty()) refuse("to_plan", of_files);
  if (!options.job_id.empty()) refuse("job_id", of_files);
  if (options.step) refuse("step", of_files);
  if (!options.key.empty()) refuse("key", of_files);
  if (!options.file_pattern.empty()) refuse("file_pattern", of_files);
  if (!options.extra_files.empty() && options.base_model.empty())
    refuse("extra_files", "without base_model there are no files to copy");
  if (options.source_layout && plan.empty()) refuse("source_layout", "without a plan, the parts state their places");
}

Request live_request(const std::string& plan, const ExportOptions& options) {
  Request request = request_of({}, plan, options);
  request.by_boxes = plan.empty();
  return request;
}

/// Returns the opening step of a rank. The options of rank 0 are checked in it, so that all ranks get the error.
ExportRun::Open open_parts(std::span<const TensorPart> parts, const ExportOptions& options, const std::string& plan) {
  return [parts, &options, &plan](Group& group) {
    if (group.rank() == 0) check_live_options(options, plan);
    return std::make_unique<LiveTensors>(parts, group);
  };
}

}  // namespace

ExportReport export_model(std::span<const TensorPart> parts, const std::string& out, const std::string& plan,
                          Group& group, const ExportOptions& options) {
  const group::Use use(group);
  trace::Span span(trace::Kind::export_model, "export_model", group::inside(group).operations().next());
  ExportRun run(group, live_request(plan, options), out, options, open_parts(parts, options, plan));
  const FailOnStop on_stop = fail_on_stop(group, options.stop, &run.is_written());
  return run.run(span);
}

}  // namespace muster
