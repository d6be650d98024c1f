// SPDX-License-Identifier: Apache-2.0
// The public calls and their results. Merges are implemented in merge_shm.cpp and route.cpp.

#include "muster/gather.hpp"
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>
#include "muster/async.hpp"
#include "muster/merge_gather.hpp"
#include "src/gather/exchange.hpp"
#include "src/gather/opening.hpp"
#include "src/gather/stream.hpp"
#include "src/group/async_executor.hpp"
#include "src/group/kept_memory.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/clock.hpp"

namespace muster {

bool ExchangeResult::wait_released(std::chrono::milliseconds timeout) const {
  if (!state_) return true;
  const auto deadline = os::Clock::now() + group::bounded(timeout);
  for (const auto& obligation : state_->obligations)
    if (!obligation->wait(deadline)) return false;
  return true;
}

void detail::refuse_index(std::size_t index, std::size_t size) {
  throw Error(ErrorKind::invalid_argument, fmt::format("result: index {} is out of range for {} entries", index, size));
}

std::size_t detail::position_of(int rank, const std::vector<int>& ranks, std::size_t size) {
  const auto position = static_cast<std::size_t>(std::ranges::find(ranks, rank) - ranks.begin());
  if (position >= size)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("result: rank {} has no entry here: {}", rank,
                            position < ranks.size() ? "only the root has entries"
                                                    : fmt::format("the list is [{}]", fmt::join(ranks, ", "))));
  return position;
}

const ExchangeReport& ExchangeResult::report() const {
  static const ExchangeReport nothing;
  return state_ ? state_->report : nothing;
}

std::string ExchangeResult::explain() const {
  const ExchangeReport& report = this->report();
  if (!state_) return "no exchange";
  if (ranks_.empty()) return "in no list: took part in the rounds only";
  std::string text = fmt::format("route {} ({}): {} bytes of {} ranks", to_string(report.route), report.reason,
                                 report.payload_bytes, ranks_.size());
  if (report.arena_bytes != 0) text += fmt::format(", {} of them in shared memory already", report.arena_bytes);
  if (report.network_bytes != 0)
    text += fmt::format(", {} of them by {}", report.network_bytes, report.route == Route::tcp ? "TCP" : "MPI");
  text += fmt::format(", {} round{}", report.rounds, report.rounds == 1 ? "" : "s");
  for (const PhaseReport& phase : report.phases) {
    text += fmt::format("; {} {:.3f} ms", phase.name, phase.seconds * 1e3);
    if (phase.bytes != 0) text += fmt::format(" ({} bytes, {} copy)", phase.bytes, phase.copies);
    if (phase.page_faults != 0) text += fmt::format(" ({} page faults)", phase.page_faults);
  }
  return text;
}

GatheredConfigs get_configs_parallel(const Config* config, const RankList& ranks, Group& group,
                                     const GatherOptions& options) {
  return gather::collectively(group, gather::GatherKind::configs, [&]() -> GatheredConfigs {
    gather::Outcome outcome = gather::exchange(gather::GatherKind::configs, config, ranks.in(group), group, options);
    return {std::move(outcome.list), std::move(outcome.entries), std::move(outcome.state)};
  });
}

namespace gather {
namespace {

/// `make` returns the tensor. If it throws, all ranks receive the error.
template <class Make>
GatheredTensors tensors_of(const Make& make, const RankList& ranks, Group& group, const GatherOptions& options) {
  return collectively(group, GatherKind::tensors, [&]() -> GatheredTensors {
    const Config value = make();
    Outcome outcome = exchange(GatherKind::tensors, &value, ranks.in(group), group, options);
    std::vector<std::optional<Tensor>> entries(outcome.entries.size());
    for (std::size_t i = 0; i < entries.size(); ++i)
      if (outcome.entries[i]) entries[i] = outcome.entries[i]->as_tensor();
    return {std::move(outcome.list), std::move(entries), std::move(outcome.state)};
  });
}

template <class Make>
MergeResult merged_of(const Make& make, const Merge& merge, const RankList& ranks, Group& group,
                      const GatherOptions& options) {
  return collectively(group, GatherKind::merge, [&]() -> MergeResult {
    const Config value = make();
    Outcome outcome = exchange(GatherKind::merge, &value, ranks.in(group), group, options, &merge);
    std::optional<Tensor> merged;
    if (!outcome.entries.empty() && outcome.entries.front()) merged = outcome.entries.front()->as_tensor();
    return {std::move(outcome.list), std::move(merged), std::move(outcome.state)};
  });
}

}  // namespace

GatheredTensors get_tensors(const Tensor& tensor, const RankList& ranks, Group& group, const GatherOptions& options) {
  return tensors_of([&] { return tensor; }, ranks, group, options);
}

MergeResult merge_tensor(const Tensor& tensor, const Merge& merge, const RankList& ranks, Group& group,
                         const GatherOptions& options) {
  return merged_of([&] { return tensor; }, merge, ranks, group, options);
}

}  // namespace gather

GatheredTensors get_tensors_parallel(const TensorView& tensor, const RankList& ranks, Group& group,
                                     const GatherOptions& options) {
  return gather::tensors_of([&] { return Tensor::borrow(tensor); }, ranks, group, options);
}

GatheredConfigs get_configs_parallel(const Config* config, const RankList& ranks) {
  return get_configs_parallel(config, ranks, *world());
}

GatheredTensors get_tensors_parallel(const TensorView& tensor, const RankList& ranks) {
  return get_tensors_parallel(tensor, ranks, *world());
}

std::uint64_t trim(Group& group) {
  const group::GroupLock use(group);
  std::uint64_t bytes = gather::trim_streams(group) + gather::trim_async(group) +
                        group::inside(group).extension<group::KeptMemory>()->trim();
  for (const auto& driver : gather::RouteTable::instance().drivers()) bytes += driver->trim(group);
  return bytes;
}

MergeResult merge_tensor_parallel(const TensorView& tensor, const Merge& merge, const RankList& ranks, Group& group,
                                  const GatherOptions& options) {
  return gather::merged_of([&] { return Tensor::borrow(tensor); }, merge, ranks, group, options);
}

MergeResult merge_tensor_parallel(const TensorView& tensor, const Merge& merge, const RankList& ranks) {
  return merge_tensor_parallel(tensor, merge, ranks, *world());
}

// The asynchronous calls of a group. They run on its lane, because they wait.
namespace gather {
namespace {

/// The asynchronous state of a group, created by the thread that uses the group.
struct AsyncState {
  std::unique_ptr<group::AsyncExecutor> lane;
};

AsyncState& state_of(Group& group) {
  return *group::inside(group).extension<AsyncState>();
}

/// Runs call(list, group) on the lane.
template <class Call>
auto start(const RankList& ranks, Group& group, Call call) {
  const group::GroupLock use(group);
  std::unique_ptr<group::AsyncExecutor>& lane = state_of(group).lane;
  if (!lane) lane = std::make_unique<group::AsyncExecutor>(group);
  const std::span<const int> list = ranks.in(group);
  auto task =
      detail::task_of<Group>([call = std::move(call), list = std::vector<int>(list.begin(), list.end())](
                                 Group& own) { return call(list, own); },
                             [tasks = lane->tasks()](Group&) { group::AsyncExecutor::pass_on_failure(*tasks); });
  lane->add([run = std::move(task.run), own = lane->own()] { run(*own); });
  return std::move(task.work);
}

}  // namespace

void refuse_asynchronous(const Config& value) {
  if (group::AsyncExecutor::is_this_thread() && (residency_of(value) | Residency::host) == Residency::mixed)
    throw Error(ErrorKind::unsupported, fmt::format("asynchronous calls need tensors on the host, but these are on {}. "
                                                    "Copy them to the host first, or use the call without _async",
                                                    places_text(value)));
}

void refuse_async(GatherKind operation, const Error& failure, Group& group) {
  (void)start(all_ranks, group, [operation, failure](const std::vector<int>& list, Group& own) {
    refuse(operation, failure, list, own, {});
  });
}

std::uint64_t trim_async(Group& group) {
  std::uint64_t bytes = 0;
  if (const AsyncState& state = state_of(group); state.lane)
    state.lane->if_idle([&](Group& own) { bytes = trim(own); });
  return bytes;
}

}  // namespace gather

Work<GatheredConfigs> get_configs_async(std::optional<Config> config, const RankList& ranks, Group& group,
                                        const GatherOptions& options) {
  return gather::start(ranks, group, [config = std::move(config), options](const std::vector<int>& list, Group& own) {
    return get_configs_parallel(config ? &*config : nullptr, list, own, options);
  });
}

Work<GatheredTensors> get_tensors_async(Tensor tensor, const RankList& ranks, Group& group,
                                        const GatherOptions& options) {
  return gather::start(ranks, group, [tensor = std::move(tensor), options](const std::vector<int>& list, Group& own) {
    return gather::get_tensors(tensor, list, own, options);
  });
}

Work<MergeResult> merge_tensor_async(Tensor tensor, const Merge& merge, const RankList& ranks, Group& group,
                                     const GatherOptions& options) {
  return gather::start(ranks, group,
                       [tensor = std::move(tensor), merge, options](const std::vector<int>& list, Group& own) {
                         return gather::merge_tensor(tensor, merge, list, own, options);
                       });
}

Work<StreamReport> gather_each_async(LayerSource source, const RankList& ranks, Group& group, LayerConsumer consume,
                                     const StreamOptions& options) {
  return gather::start(
      ranks, group,
      [source = std::move(source), consume = std::move(consume), options](const std::vector<int>& list, Group& own) {
        return gather_each(source, list, own, consume, options);
      });
}

}  // namespace muster
