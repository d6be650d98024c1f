// SPDX-License-Identifier: Apache-2.0
// Asynchronous gathers, merges and streams: their results, their order, other calls beside them, failures and
// destruction.

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "muster/async.hpp"
#include "muster/process_group.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/shared_words.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

/// Returns the tensor of `rank` in `turn`.
Tensor tensor_of(int rank, int turn, std::int64_t rows = 300) {
  return pattern(DType::u8, {rows, 100}, static_cast<std::uint64_t>(100 * turn + rank));
}

void check_turn(const GatheredTensors& result, int rank, int turn) {
  RANK_CHECK(result.size() == (rank == 0 ? four.size() : 0));
  for (const auto& [from, tensor] : result.present()) RANK_CHECK(bitwise_equal(tensor, tensor_of(from, turn)));
}

/// A source of `layers` layers. Each layer is this rank's tensor of that turn.
LayerSource layers_of(int rank, int layers) {
  return [rank, layers, next = 0]() mutable -> std::optional<Config> {
    if (next == layers) return std::nullopt;
    return Config(tensor_of(rank, next++));
  };
}

}  // namespace

TEST_CASE("works of a group complete in the order in which they were started, beside other calls of the group") {
  run_ranks(4, [](Group& group) {
    std::vector<Work<GatheredTensors>> works;
    for (int turn = 0; turn < 6; ++turn) {
      works.push_back(get_tensors_async(tensor_of(group.rank(), turn), four, group));
      check_turn(get_tensors_parallel(tensor_of(group.rank(), 50 + turn), four, group), group.rank(), 50 + turn);
      group.barrier();
    }
    for (int turn = 5; turn >= 0; --turn) {
      Work<GatheredTensors>& work = works[static_cast<std::size_t>(turn)];
      check_turn(work.get(), group.rank(), turn);
      RANK_CHECK(!work.is_pending());
      RANK_CHECK(error_of([&] { (void)work.get(); }).kind() == ErrorKind::invalid_argument);
    }
    RANK_CHECK(error_of([&] { (void)Work<MergeResult>().is_done(); }).kind() == ErrorKind::invalid_argument);
  });
}

TEST_CASE("of two threads that use a group at once, one gets an error") {
  SharedWords refused;
  run_ranks(2, [&](Group& group) {
    // Rank 1 arrives when rank 0 has refused one of its threads.
    while (group.rank() == 1 && refused[0] == 0) std::this_thread::sleep_for(1ms);
    const auto call = [&] {
      try {
        group.barrier();
      } catch (const Error& error) {
        if (says(error, "two threads use it at the same time")) ++refused[0];
      }
    };
    std::thread other;
    if (group.rank() == 0) other = std::thread(call);
    call();
    if (other.joinable()) other.join();
  });
  CHECK(refused[0] == 1);
}

TEST_CASE("each kind of work returns the result of the call without _async") {
  run_ranks(4, [](Group& group) {
    const int rank = group.rank();
    auto configs = get_configs_async(rank == 2 ? std::nullopt : std::optional(Config(rank)), four, group);
    auto merged = merge_tensor_async(tensor_of(rank, 0), merge::concat(0), four, group);
    std::vector<int> seen;
    auto stream = gather_each_async(layers_of(rank, 5), four, group, [&](LayerPart& part) {
      for (const auto& [from, config] : part.present())
        RANK_CHECK(bitwise_equal(config.as_tensor(), tensor_of(from, static_cast<int>(part.layer))));
      seen.push_back(static_cast<int>(part.layer));
    });
    const GatheredConfigs all = configs.get();
    for (const auto& [from, config] : all.present()) RANK_CHECK(config.as_int() == from);
    RANK_CHECK(all.present().size() == (rank == 0 ? 3U : 0U));
    const MergeResult whole = merged.get();
    RANK_CHECK(whole.tensor().has_value() == (rank == 0));
    if (rank == 0) RANK_CHECK((whole.tensor()->shape() == Shape{1200, 100}));
    RANK_CHECK(stream.get().layers == 5);
    RANK_CHECK(seen == (rank == 0 ? std::vector<int>{0, 1, 2, 3, 4} : std::vector<int>{}));
    // When no work runs, trim frees all memory that they have kept.
    (void)trim(group);
  });
}

TEST_CASE("the caller continues while a work waits for a late rank, and owns its memory again when the work is done") {
  run_ranks(4, [](Group& group) {
    std::vector<std::byte> mine(30000, std::byte{7});
    if (group.rank() == 3) std::this_thread::sleep_for(300ms);
    const auto begin = std::chrono::steady_clock::now();
    Work<GatheredTensors> warm = get_tensors_async(tensor_of(group.rank(), 0), four, group);
    (void)warm.get();
    if (group.rank() == 3) std::this_thread::sleep_for(300ms);
    Work<GatheredTensors> work = get_tensors_async(Tensor::borrow({DType::u8, {30000}, mine.data()}), four, group);
    if (group.rank() == 0) RANK_CHECK(!work.is_done());
    RANK_CHECK(work.wait_for(20s));
    RANK_CHECK(work.is_done());
    std::ranges::fill(mine, std::byte{8});
    const GatheredTensors result = work.get();
    for (const auto& [from, tensor] : result.present())
      if (from != 0) RANK_CHECK(tensor.bytes()[29999] == std::byte{7});
    RANK_CHECK(std::chrono::steady_clock::now() - begin < 20s);
  });
}

TEST_CASE("a work throws the same error as the call: invalid arguments leave the group usable") {
  run_ranks(4, [](Group& group) {
    Work<GatheredTensors> work = get_tensors_async(tensor_of(group.rank(), 0, 100 + group.rank()), four, group);
    const Error error = error_of([&] { (void)work.get(); });
    RANK_CHECK(error.kind() == ErrorKind::rank_mismatch);
    RANK_CHECK(says(error, "[101, 100]"));
    Work<StreamReport> stream = gather_each_async(
        [rank = group.rank()]() -> std::optional<Config> {
          if (rank == 1) throw std::runtime_error("no such layer");
          return std::nullopt;
        },
        four, group, [](LayerPart&) {});
    RANK_CHECK(says(error_of([&] { (void)stream.get(); }), "no such layer"));
    RANK_CHECK(!group.error());
    check_turn(get_tensors_async(tensor_of(group.rank(), 1), four, group).get(), group.rank(), 1);
  });
}

TEST_CASE("a cancelled work fails the group and the works after it") {
  run_ranks(4, [](Group& group) {
    std::stop_source stop;
    (void)get_tensors_async(tensor_of(group.rank(), 0), four, group).get();
    // Rank 1 cancels while rank 2 is late. Rank 2 may receive the error before it starts.
    if (group.rank() == 2) std::this_thread::sleep_for(300ms);
    const Error error = error_of([&] {
      auto work = get_tensors_async(tensor_of(group.rank(), 1), four, group, {.stop = stop.get_token()});
      if (group.rank() == 1) stop.request_stop();
      (void)work.get();
    });
    RANK_CHECK(error.kind() == ErrorKind::cancelled);
    RANK_CHECK(error.rank() == 1);
    // The group gets the error from this rank's own work, or from another rank's.
    while (!group.error()) std::this_thread::sleep_for(1ms);
    RANK_CHECK(error_of([&] { (void)get_tensors_async(tensor_of(0, 2), four, group); }).kind() == ErrorKind::cancelled);
  });
}

TEST_CASE("dropped works run to completion, and the destructor of the group waits for them") {
  run_ranks(4, [](Group& group) {
    std::atomic<int> consumed{0};
    {
      const auto copy = group.duplicate();
      (void)get_tensors_async(tensor_of(group.rank(), 0), four, *copy);
      (void)gather_each_async(layers_of(group.rank(), 20), four, *copy, [&](LayerPart&) { ++consumed; });
    }
    RANK_CHECK(consumed == (group.rank() == 0 ? 20 : 0));
    group.barrier();
  });
}

TEST_CASE("a killed rank ends the works of the other ranks, with an error that names it") {
  const GroupOf group_of(4);
  Ranks ranks(4, [&group_of](int rank) {
    const auto group = group_of.join(rank, 20s);
    (void)get_tensors_async(tensor_of(rank, 0), four, *group).get();
    if (rank == 2) {
      ::raise(SIGKILL);
    }
    Work<GatheredTensors> work = get_tensors_async(tensor_of(rank, 1), four, *group);
    const auto begin = std::chrono::steady_clock::now();
    const Error error = error_of([&] { (void)work.get(); });
    RANK_CHECK(error.kind() == ErrorKind::peer_lost);
    RANK_CHECK(error.rank() == 2);
    RANK_CHECK(std::chrono::steady_clock::now() - begin < 5s);
  });
  check_ended(ranks.wait(), {2});
}

TEST_CASE("a work that owns the last reference to its group ends the group on the work's own thread") {
  for (const bool dies : {false, true}) {
    const GroupOf group_of(2);
    Ranks ranks(2, [&](int rank) {
      // Destroying this group would end all groups over TCP in this process, so it outlives the works.
      const auto joined = group_of.join(rank, 20s);
      auto group = joined->duplicate();
      const std::vector<int> both{0, 1};
      (void)get_tensors_async(tensor_of(rank, 0), both, *group).get();
      auto calls = std::make_shared<ProcessGroup>(*group);
      Work<void> call = calls->start([calls](ProcessGroup& own) { own.barrier(); });
      calls.reset();
      call.get();
      Work<StreamReport> work = gather_each_async(layers_of(rank, 6), both, *group, [group](LayerPart&) {});
      // The next call still runs on the worker thread that the first work ends.
      Work<GatheredTensors> next = get_tensors_async(tensor_of(rank, 1), both, *group);
      if (dies && rank == 1) ::raise(SIGKILL);
      group.reset();
      const auto get_or_lose = [&](auto& each) {
        try {
          (void)each.get();
        } catch (const Error& error) {
          if (!dies) throw;
          RANK_CHECK(error.kind() == ErrorKind::peer_lost && error.rank() == 1);
        }
      };
      get_or_lose(work);
      get_or_lose(next);
      // The worker thread may still be destroying the group.
      std::this_thread::sleep_for(100ms);
    });
    check_ended(ranks.wait(), dies ? std::vector<int>{1} : std::vector<int>{});
  }
}

TEST_CASE("a child forked while works run exits without them") {
  run_ranks(2, [](Group& group) {
    const auto copy = group.duplicate();
    Work<StreamReport> work = gather_each_async(layers_of(group.rank(), 50), std::vector{0, 1}, *copy,
                                                [](LayerPart&) { std::this_thread::sleep_for(1ms); });
    const pid_t child = ::fork();
    if (child == 0) {
      // Does the same as the destructors of a child.
      const_cast<std::shared_ptr<Group>&>(copy).reset();
      ::_exit(0);
    }
    int status = -1;
    RANK_CHECK(::waitpid(child, &status, 0) == child && status == 0);
    RANK_CHECK(work.get().layers == 50);
  });
}

TEST_CASE("calls that are started run in order while the group does other work") {
  run_ranks(3, [](Group& group) {
    ProcessGroup ranks(group);
    std::vector<Tensor> gradients;
    std::vector<Work<void>> works;
    for (int i = 0; i < 8; ++i) {
      gradients.push_back(Tensor::take(std::vector<float>(static_cast<std::size_t>(1 + i * 9999), 1.0F)));
      works.push_back(ranks.start([tensor = gradients.back()](ProcessGroup& own) { own.all_reduce(tensor); }));
    }
    auto all = ranks.start([rank = group.rank()](ProcessGroup& own) {
      return own.all_gather(Tensor::take(std::vector<std::int32_t>{rank}));
    });
    const Tensor own = Tensor::take(std::vector<std::int32_t>(70000, group.rank()));
    for (int i = 0; i < 5; ++i) {
      ranks.broadcast(own, i % 3);
      RANK_CHECK(own.values<std::int32_t>()[69999] == 0);
    }
    for (Work<void>& work : works) work.get();
    for (const Tensor& gradient : gradients)
      for (const float value : gradient.values<float>()) RANK_CHECK(value == 3.0F);
    RANK_CHECK(bitwise_equal(all.get(), Tensor::take(std::vector<std::int32_t>{0, 1, 2})));
    auto bad = ranks.start([&](ProcessGroup& lent) { lent.broadcast(own, 3); });
    error_of(ErrorKind::invalid_argument, {"root 3"}, [&] { bad.get(); });
    ranks.barrier();
  });
}
