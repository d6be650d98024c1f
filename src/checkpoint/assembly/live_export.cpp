// SPDX-License-Identifier: Apache-2.0
// Live exports: the steps of export_run.hpp over the tensors of the ranks.

#include "muster/live_export.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/log.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/checkpoint/assembly/agreement.hpp"
#include "src/checkpoint/assembly/export_run.hpp"
#include "src/checkpoint/assembly/live_export.hpp"
#include "src/checkpoint/assembly/live_tensors.hpp"
#include "src/group/async_executor.hpp"
#include "src/group/group.hpp"
#include "src/group/kept_memory.hpp"
#include "src/os/shared_memory.hpp"
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
    refuse("extra_files", "without base_model nothing can be copied");
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

/// The exports of a group that run while their callers continue.
struct LiveExports {
  std::unique_ptr<group::AsyncExecutor> lane;
};

/// Logs the failure of an export that no caller takes.
class UntakenFailure {
 public:
  explicit UntakenFailure(std::string out) : out_(std::move(out)) {}
  void failed(const std::string& words) {
    const std::lock_guard lock(mutex_);
    words_ = words;
    report();
  }
  void dropped() {
    const std::lock_guard lock(mutex_);
    is_dropped_ = true;
    report();
  }

 private:
  void report() const {
    if (is_dropped_ && !words_.empty())
      log(LogLevel::error, fmt::format("the export to {} failed: {}", in_quotes(out_), words_));
  }
  const std::string out_;
  ForkMutex mutex_;
  std::string words_;
  bool is_dropped_ = false;
};

class LiveOperation final : public detail::Operation<ExportReport> {
 public:
  LiveOperation(Work<ExportReport> work, std::shared_ptr<UntakenFailure> untaken)
      : work_(std::move(work)), untaken_(std::move(untaken)) {}
  LiveOperation& operator=(LiveOperation&&) = delete;
  ~LiveOperation() override {
    if (untaken_) untaken_->dropped();
  }
  bool wait_for(std::chrono::milliseconds time) override { return work_.wait_for(time); }
  ExportReport get() override {
    untaken_.reset();
    return work_.get();
  }
  [[nodiscard]] bool has_ended() const noexcept override { return true; }

 private:
  Work<ExportReport> work_;
  std::shared_ptr<UntakenFailure> untaken_;
};

/// The memory of a snapshot, until it is written.
class LiveSnapshot {
 public:
  explicit LiveSnapshot(std::shared_ptr<group::KeptMemory> kept) : kept_(std::move(kept)) {}
  LiveSnapshot& operator=(LiveSnapshot&&) = delete;
  ~LiveSnapshot() { kept_->give_back(); }

  /// Collective. Copies the elements that this rank contributes. Throws Error(out_of_space) on all ranks if a host
  /// lacks the memory; nothing is copied then.
  void take(Group& group, LiveTensors& tensors, std::span<const std::size_t> contributed) {
    const std::uint64_t bytes = tensors.bytes_to_keep(contributed);
    check_room(group, bytes);
    std::span<std::byte> memory;
    agree_on(group, "export: allocating a snapshot", [&] { memory = kept_->take(bytes); });
    agree_on(group, "export: copying", [&] { tensors.keep(contributed, memory); });
  }

 private:
  void check_room(Group& group, std::uint64_t bytes) const {
    struct Needs {
      std::uint64_t more = 0;
      RankRoom room;
    };
    const std::uint64_t size = kept_->size();
    const Needs mine{bytes > size ? bytes - size : 0, os::memory_headroom(os::Backing::anonymous)};
    std::vector<Needs> all(static_cast<std::size_t>(group.size()));
    group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)),
                     {.phase = "export: comparing memory"});
    std::vector<RankRoom> rooms;
    std::vector<std::uint64_t> needed;
    for (const Needs& needs : all) {
      rooms.push_back(needs.room);
      needed.push_back(needs.more);
    }
    check_rooms(group, rooms, needed, "memory for a snapshot",
                "use export_model without _async, or export layer by layer");
  }

  std::shared_ptr<group::KeptMemory> kept_;
};

/// Collective. Returns the lane for exports. It is renewed if an export was cancelled, which only some ranks may know.
group::AsyncExecutor& lane_of(Group& group, LiveExports& exports) {
  const bool is_old = !exports.lane || exports.lane->own()->error();
  if (group::inside(group).any(is_old, {.phase = "export: setting up"}))
    exports.lane = std::make_unique<group::AsyncExecutor>(group);
  return *exports.lane;
}

/// Collective. Waits until the earlier exports have ended, and returns the lane.
group::AsyncExecutor& idle_lane_of(Group& group) {
  const auto exports = group::inside(group).extension<LiveExports>();
  if (exports->lane) exports->lane->wait_idle();
  return lane_of(group, *exports);
}

/// The state of a group after an export on its lane has failed.
void pass_on(group::AsyncExecutor::Tasks& tasks, const Group& own) noexcept {
  const std::optional<Error> cause = own.error();
  if (cause && cause->kind() != ErrorKind::cancelled) group::AsyncExecutor::pass_on_failure(tasks);
}

}  // namespace

void refuse_export(Group& group, const Error& failure, ExportForm form) {
  const group::GroupLock use(group);
  const trace::Span span(trace::SpanKind::export_model, "export_model", group::inside(group).operations().next());
  if (form == ExportForm::asynchronous) (void)idle_lane_of(group);
  agree(group::inside(group), failure, "export: opening the tensors");
}

ExportReport export_model(std::span<const TensorPart> parts, const std::string& out, const std::string& plan,
                          Group& group, const ExportOptions& options) {
  const group::GroupLock use(group);
  trace::Span span(trace::SpanKind::export_model, "export_model", group::inside(group).operations().next());
  ExportRun run(group, live_request(plan, options), out, options, open_parts(parts, options, plan));
  const FailOnStop on_stop = fail_on_stop(group, options.stop, &run.is_written());
  return run.run(span);
}

ExportReport export_model(const PartSource& next, const std::string& out, const std::string& plan, Group& group,
                          const ExportOptions& options) {
  const group::GroupLock use(group);
  trace::Span span(trace::SpanKind::export_model, "export_model", group::inside(group).operations().next());
  // The parts of the current unit. They are dropped before the next call of `next`.
  std::optional<std::vector<TensorPart>> unit;
  ExportRun run(group, live_request(plan, options), out, options, [&](Group& ranks) -> std::unique_ptr<ExportSource> {
    if (ranks.rank() == 0) check_live_options(options, plan);
    unit.reset();
    unit = next();
    if (!unit) return nullptr;
    return std::make_unique<LiveTensors>(*unit, ranks);
  });
  const FailOnStop on_stop = fail_on_stop(group, options.stop, &run.is_written());
  return run.run_units(span);
}

Work<ExportReport> export_model_async(std::span<const TensorPart> parts, const std::string& out,
                                      const std::string& plan, Group& group, const ExportOptions& options) {
  const group::GroupLock use(group);
  trace::Span span(trace::SpanKind::export_model, "export_model_async", group::inside(group).operations().next());
  group::AsyncExecutor& lane = idle_lane_of(group);
  const auto run =
      std::make_shared<ExportRun>(group, live_request(plan, options), out, options, open_parts(parts, options, plan));
  const auto snapshot = std::make_shared<LiveSnapshot>(group::inside(group).extension<group::KeptMemory>());
  {
    const FailOnStop on_stop = fail_on_stop(group, options.stop);
    run->prepare(span);
    snapshot->take(group, static_cast<LiveTensors&>(run->source()), run->contributed());
  }
  run->move_to(*lane.own());
  const auto untaken = std::make_shared<UntakenFailure>(out);
  auto task = detail::task_of<Group>(
      // Not const, so that moving the call moves the captures.
      [run = run, snapshot = snapshot, untaken = untaken, stop = options.stop](Group& own) {
        try {
          const FailOnStop on_stop = fail_on_stop(own, stop, &run->is_written());
          return run->complete();
        } catch (const std::exception& error) {
          untaken->failed(error.what());
          throw;
        }
      },
      [tasks = lane.tasks()](Group& own) { pass_on(*tasks, own); });
  lane.add([run_task = std::move(task.run), own = lane.own()] { run_task(*own); });
  return Work<ExportReport>(std::make_shared<LiveOperation>(std::move(task.work), untaken));
}

}  // namespace muster
