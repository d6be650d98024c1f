// SPDX-License-Identifier: Apache-2.0
// The asynchronous calls of a group. They run on its lane, because they wait.

#include "muster/async.hpp"

#include <fmt/core.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "src/gather/exchange.hpp"
#include "src/gather/opening.hpp"
#include "src/sync/lane.hpp"

namespace muster {
namespace gather {
namespace {

/// The asynchronous state of a group, created by the thread that uses the group.
struct AsyncState {
  std::unique_ptr<sync::Lane> lane;
};

AsyncState& state_of(SyncGroup& group) {
  return *sync::inside(group).extension<AsyncState>();
}

/// Runs call(list, group) on the lane.
template <class Call>
auto start(const RankList& ranks, SyncGroup& group, Call call) {
  const sync::Use use(group);
  std::unique_ptr<sync::Lane>& lane = state_of(group).lane;
  if (!lane) lane = std::make_unique<sync::Lane>(group);
  const std::span<const int> list = ranks.in(group);
  auto task = detail::task_of<SyncGroup>([call = std::move(call), list = std::vector<int>(list.begin(), list.end())](
                                             SyncGroup& own) { return call(list, own); },
                                         [tasks = lane->tasks()](SyncGroup&) { sync::Lane::pass_on_failure(*tasks); });
  lane->add([run = std::move(task.run), own = lane->own()] { run(*own); });
  return std::move(task.work);
}

}  // namespace

void refuse_asynchronous(const Config& value) {
  if (sync::Lane::is_this_thread() && (residency_of(value) | Residency::host) == Residency::mixed)
    throw Error(ErrorKind::unsupported,
                fmt::format("asynchronous calls take tensors on the host, and these are on {}: copy them there first, "
                            "or use the call without _async",
                            places_text(value)));
}

std::uint64_t trim_async(SyncGroup& group) {
  std::uint64_t bytes = 0;
  if (const AsyncState& state = state_of(group); state.lane)
    state.lane->if_idle([&](SyncGroup& own) { bytes = trim(own); });
  return bytes;
}

}  // namespace gather

Work<GatheredConfigs> get_configs_async(std::optional<Config> config, const RankList& ranks, SyncGroup& group,
                                        const GatherOptions& options) {
  return gather::start(ranks, group,
                       [config = std::move(config), options](const std::vector<int>& list, SyncGroup& own) {
                         return get_configs_parallel(config ? &*config : nullptr, list, own, options);
                       });
}

Work<GatheredTensors> get_tensors_async(Tensor tensor, const RankList& ranks, SyncGroup& group,
                                        const GatherOptions& options) {
  return gather::start(ranks, group,
                       [tensor = std::move(tensor), options](const std::vector<int>& list, SyncGroup& own) {
                         return gather::get_tensors(tensor, list, own, options);
                       });
}

Work<Merged> merge_tensor_async(Tensor tensor, const Merge& merge, const RankList& ranks, SyncGroup& group,
                                const GatherOptions& options) {
  return gather::start(ranks, group,
                       [tensor = std::move(tensor), merge, options](const std::vector<int>& list, SyncGroup& own) {
                         return gather::merge_tensor(tensor, merge, list, own, options);
                       });
}

Work<StreamReport> gather_each_async(LayerSource source, const RankList& ranks, SyncGroup& group, LayerConsumer consume,
                                     const StreamOptions& options) {
  return gather::start(
      ranks, group,
      [source = std::move(source), consume = std::move(consume), options](
          const std::vector<int>& list, SyncGroup& own) { return gather_each(source, list, own, consume, options); });
}

}  // namespace muster
