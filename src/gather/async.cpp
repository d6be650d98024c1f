// SPDX-License-Identifier: Apache-2.0
// What runs the asynchronous calls of a group: one thread, and a duplicate of the group that it alone uses.

#include "muster/async.hpp"

#include <fmt/core.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "src/gather/exchange.hpp"
#include "src/gather/opening.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace gather {
namespace {

/// Whether this thread is that of a group's asynchronous calls.
thread_local bool of_a_lane = false;

/// Runs what it is given, in that order. Its end waits for all of it.
class Lane {
 public:
  explicit Lane(std::shared_ptr<SyncGroup> group) : group_(std::move(group)) {}
  ~Lane() {
    if (os::process_id() != owner_) {
      // A forked child has no such thread to wait for.
      (void)new std::thread(std::move(thread_));
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// What this fails with is the failure of the group: the other ranks wait for the task.
  void add(std::function<void(SyncGroup&)> task) {
    sync::or_fail(*group_, [&] {
      const std::lock_guard lock(mutex_);
      if (!thread_.joinable()) begin();
      tasks_.push_back(std::move(task));
      changed_.notify_one();
    });
  }

  std::uint64_t trim_if_idle() {
    const std::lock_guard lock(mutex_);
    return tasks_.empty() && !group_->failure() ? trim(*group_) : 0;
  }

 private:
  void begin() {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      throw Error(ErrorKind::no_space, std::string("no thread for asynchronous calls: ") + error.what() +
                                           "; raise the limit of processes (ulimit -u), or call without _async");
    }
  }

  void run() {
    of_a_lane = true;
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return is_ending_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      // It stays where it is while others are added behind it.
      const std::function<void(SyncGroup&)>& task = tasks_.front();
      lock.unlock();
      task(*group_);
      lock.lock();
      // Only now: while it runs, the group is in use.
      tasks_.pop_front();
    }
  }

  std::shared_ptr<SyncGroup> group_;
  std::int64_t owner_ = os::process_id();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void(SyncGroup&)>> tasks_;
  bool is_ending_ = false;
  std::thread thread_;
};

/// What a group keeps; made by the thread that uses the group.
struct AsyncState {
  std::unique_ptr<Lane> lane;
};

AsyncState& state_of(SyncGroup& group) {
  return *sync::inside(group).extension<AsyncState>();
}

/// call(list, group).
template <class Result, class Call>
Work<Result> start(const RankList& ranks, SyncGroup& group, Call call) {
  const sync::Use use(group);
  AsyncState& state = state_of(group);
  if (!state.lane) state.lane = std::make_unique<Lane>(group.duplicate({.phase = "asynchronous calls: setting up"}));
  const std::span<const int> list = ranks.in(group);
  const auto task = std::make_shared<std::packaged_task<Result(SyncGroup&)>>(
      [call = std::move(call), list = std::vector<int>(list.begin(), list.end()),
       parent = group.weak_from_this()](SyncGroup& own) mutable {
        // What the caller lends ends with the call, not with its result.
        const Call once = std::move(call);
        try {
          return once(list, own);
        } catch (const Error&) {
          if (const auto cause = own.failure())
            if (const auto all = parent.lock()) all->poison(*cause);
          throw;
        }
      });
  Work<Result> work(task->get_future());
  state.lane->add([task](SyncGroup& own) { (*task)(own); });
  return work;
}

}  // namespace

void refuse_asynchronous(const Config& value) {
  if (of_a_lane && (residency_of(value) | Residency::host) == Residency::mixed)
    throw Error(ErrorKind::unsupported,
                fmt::format("asynchronous calls take tensors on the host, and these are on {}: copy them there first, "
                            "or use the call without _async",
                            places_text(value)));
}

std::uint64_t trim_async(SyncGroup& group) {
  const AsyncState& state = state_of(group);
  return state.lane ? state.lane->trim_if_idle() : 0;
}

}  // namespace gather

void detail::refuse_empty_work() {
  throw Error(ErrorKind::argument, "a Work without an operation: its result has been taken, or there was never one");
}

Work<GatheredConfigs> get_configs_async(std::optional<Config> config, const RankList& ranks, SyncGroup& group,
                                        const GatherOptions& options) {
  return gather::start<GatheredConfigs>(
      ranks, group, [config = std::move(config), options](const std::vector<int>& list, SyncGroup& own) {
        return get_configs_parallel(config ? &*config : nullptr, list, own, options);
      });
}

Work<GatheredTensors> get_tensors_async(Tensor tensor, const RankList& ranks, SyncGroup& group,
                                        const GatherOptions& options) {
  return gather::start<GatheredTensors>(
      ranks, group, [tensor = std::move(tensor), options](const std::vector<int>& list, SyncGroup& own) {
        return gather::get_tensors(tensor, list, own, options);
      });
}

Work<Merged> merge_tensor_async(Tensor tensor, const Merge& merge, const RankList& ranks, SyncGroup& group,
                                const GatherOptions& options) {
  return gather::start<Merged>(
      ranks, group, [tensor = std::move(tensor), merge, options](const std::vector<int>& list, SyncGroup& own) {
        return gather::merge_tensor(tensor, merge, list, own, options);
      });
}

Work<StreamReport> gather_each_async(LayerSource source, const RankList& ranks, SyncGroup& group, LayerConsumer consume,
                                     const StreamOptions& options) {
  return gather::start<StreamReport>(
      ranks, group,
      [source = std::move(source), consume = std::move(consume), options](
          const std::vector<int>& list, SyncGroup& own) { return gather_each(source, list, own, consume, options); });
}

}  // namespace muster
