// SPDX-License-Identifier: Apache-2.0
// MPI's progress rule: while a rank waits for anything, the messages of all groups of its process make progress.
// MUSTER_TEST_PROGRAMS sets the number of random programs (20; the long campaign runs hundreds). MUSTER_TEST_SEED sets
// the seed of the first program (1). A failure reports the seed of its program.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "doctest/doctest.h"
#include "muster/compat/dist.hpp"
#include "muster/compat/group_coordinator.hpp"
#include "muster/compat/roles.hpp"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "muster/process_group.hpp"
#include "muster/tcp.hpp"
#include "muster/workspace.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

// The first tests run a table of cases: two ranks exchange a long message, and call a collective while it is in flight.

constexpr std::int64_t long_message = 3 << 20;

Tensor long_tensor(int from) {
  return pattern(DType::u8, {long_message}, static_cast<std::uint64_t>(from) + 7);
}
void check_long(const Tensor& tensor, int from) {
  RANK_CHECK(bitwise_equal(tensor, long_tensor(from)));
}

/// The send, receive and barrier calls of one interface, between ranks 0 and 1. An End waits for a message that isend
/// or irecv has begun.
struct Interface {
  using End = std::function<void()>;
  std::function<void(const Tensor&, int)> send;
  std::function<Tensor(int)> recv;
  std::function<End(const Tensor&, int)> isend;
  std::function<std::pair<Tensor, End>(int)> irecv;  // empty: the interface has no irecv
  std::function<void()> barrier;
};

template <class Result>
Interface::End end_of(Work<Result> work) {
  return [kept = std::make_shared<Work<Result>>(std::move(work))] { (void)kept->get(); };
}

Interface of_process_group(ProcessGroup& group) {
  return {.send = [&](const Tensor& tensor, int to) { group.send(tensor, to); },
          .recv =
              [&](int from) {
                const Tensor out = Tensor::allocate(DType::u8, {long_message});
                group.recv(out, from);
                return out;
              },
          .isend = [&](const Tensor& tensor, int to) { return end_of(group.isend(tensor, to)); },
          .irecv =
              [&](int from) {
                const Tensor out = Tensor::allocate(DType::u8, {long_message});
                return std::pair(out, end_of(group.irecv(out, from)));
              },
          .barrier = [&] { group.barrier(); }};
}

Interface of_dist() {
  return {.send = [](const Tensor& tensor, int to) { dist::send(tensor, to); },
          .recv =
              [](int from) {
                const Tensor out = Tensor::allocate(DType::u8, {long_message});
                dist::recv(out, from);
                return out;
              },
          .isend = [](const Tensor& tensor, int to) { return end_of(dist::isend(tensor, to)); },
          .irecv =
              [](int from) {
                const Tensor out = Tensor::allocate(DType::u8, {long_message});
                return std::pair(out, end_of(dist::irecv(out, from)));
              },
          .barrier = [] { dist::barrier(); }};
}

Interface of_roles(roles::DistributedContext& context) {
  return {.send = [&](const Tensor& tensor, int to) { context.send(tensor, to); },
          .recv = [&](int from) { return context.recv(from).data; },
          .isend =
              [&](const Tensor& tensor, int to) {
                auto handle = std::make_shared<roles::AsyncSendHandle>(context.isend(tensor, to));
                return [handle] { handle->wait(); };
              },
          .irecv = {},
          .barrier = [&] { context.barrier(); }};
}

Interface of_coordinator(GroupCoordinator& group) {
  Interface interface = of_process_group(group.process_group());
  interface.send = [&](const Tensor& tensor, int to) {
    group.send_tensor_dict(Config::object({{"w", tensor}}).as_object(), to);
  };
  interface.recv = [&](int from) { return group.recv_tensor_dict(from)["w"].as_tensor(); };
  // A coordinator has no isend or irecv for its messages.
  interface.isend = {};
  interface.irecv = {};
  return interface;
}

/// Runs a message and `meet`, a collective call of both ranks, in each order that completes in MPI.
void check_orders(int self, const Interface& calls, const std::function<void()>& meet) {
  if (calls.isend) {
    if (self == 0) {
      const auto sent = calls.isend(long_tensor(0), 1);
      meet();
      sent();
    } else {
      check_long(calls.recv(0), 0);
      meet();
    }
  }
  if (calls.irecv) {
    if (self == 0) {
      calls.send(long_tensor(0), 1);
      meet();
    } else {
      const auto [out, received] = calls.irecv(0);
      meet();
      received();
      check_long(out, 0);
    }
  }
  if (calls.isend && calls.irecv) {
    const auto [out, received] = calls.irecv(1 - self);
    const auto sent = calls.isend(long_tensor(self), 1 - self);
    meet();
    sent();
    received();
    check_long(out, 1 - self);
  }
  if (self == 0) {
    calls.send(long_tensor(0), 1);
    meet();
  } else {
    check_long(calls.recv(0), 0);
    meet();
  }
}

LayerSource layers_of(int rank, int count) {
  return [rank, count, given = std::make_shared<int>(0)]() -> std::optional<Config> {
    if (*given == count) return std::nullopt;
    ++*given;
    return Config(pattern(DType::u8, {100'000}, seed_of(rank, static_cast<std::uint64_t>(*given))));
  };
}

}  // namespace

TEST_CASE("two ranks: a message moves while one of them is in a collective call, whatever the interface") {
  const TemporaryDirectory folder;
  const std::string key = unique_key();
  run_ranks(2, [&](SyncGroup& group) {
    const int self = group.rank();
    int met = 0;
    const auto fresh = [&] { return key + std::to_string(++met); };
    ProcessGroup ranks(group);
    ProcessGroup other(group);
    const auto copy = group.duplicate();
    const Interface calls = of_process_group(ranks);
    const std::vector<std::function<void()>> meetings = {
        [&] { ranks.barrier(); },
        [&] { other.barrier(); },
        [&] { group.barrier(); },
        [&] { copy->barrier(); },
        [&] {
          const Tensor sum = Tensor::take(std::vector<float>(100'000, 1));
          other.all_reduce(sum);
          RANK_CHECK(sum.view().values<float>()[99'999] == 2);
        },
        [&] {
          const auto got = get_tensors_parallel(pattern(DType::u8, {500'000}, 3), all_ranks, group);
          RANK_CHECK(got.ranks().size() == 2);
        },
        [&] { gather_each(layers_of(self, 4), all_ranks, *copy, [](LayerPart&) {}); },
        [&] {
          if (self == 0) copy->send(1, std::vector<std::byte>(1'000'000));
          if (self == 1) RANK_CHECK(copy->receive(0, 1'000'000).size() == 1'000'000);
        },
        [&] {
          (void)ranks.split({1, 0});
        },
        [&] { (void)group.duplicate(); },
        // A rank also waits while the ranks of a new group meet.
        [&] {
          (void)file_group(
              {.directory = folder.path().string(), .key = fresh(), .rank = self, .size = 2, .timeout = 30s});
        },
        [&] {
          if (group.kind() != "local") return;
          (void)local_group({.key = fresh(), .rank = self, .size = 2, .timeout = 30s});
        },
        [&] {
          if (group.kind() != "local") return;
          const std::string address = "file://" + (folder.path() / fresh()).string();
          (void)tcp_group({.address = address, .rank = self, .size = 2, .timeout = 30s, .key = key});
        },
    };
    for (const auto& meet : meetings) check_orders(self, calls, meet);
    roles::DistributedContext context = roles::initialize_distributed_compute(group, {});
    const Interface of_context = of_roles(context);
    check_orders(self, of_context, of_context.barrier);
    GroupCoordinator coordinator(std::vector<std::vector<int>>{{0, 1}}, group);
    const Interface of_group = of_coordinator(coordinator);
    check_orders(self, of_group, of_group.barrier);
  });
}

TEST_CASE("two ranks: dist, and a call on another thread") {
  const std::string key = "file://" + (std::filesystem::temp_directory_path() / unique_key()).string();
  run_processes(2, [&](int rank) {
    dist::init_process_group("shm", {.init_method = key, .world_size = 2, .rank = rank, .timeout = 20s});
    const Interface calls = of_dist();
    check_orders(rank, calls, calls.barrier);
    ProcessGroup& world = dist::process_group();
    // This thread waits for a second thread, which waits for the other rank.
    check_orders(rank, calls, [&] { world.start([](ProcessGroup& own) { own.barrier(); }).get(); });
    dist::destroy_process_group();
  });
}

TEST_CASE("unexpected messages are matched by tag, and limited for each sender") {
  run_ranks(2, [](SyncGroup& group) {
    ProcessGroup ranks(group);
    // Other kinds of groups get fewer messages, because their transport also lists its messages in flight.
    const int count = group.kind() == "local" ? 40'000 : 4'000;
    const auto begin = std::chrono::steady_clock::now();
    std::vector<Work<void>> sent;
    for (int tag = 0; tag < count && ranks.rank() == 0; ++tag)
      sent.push_back(ranks.isend(Tensor::take(std::vector<int>{tag}), 1, tag));
    for (int tag = count; tag-- > 0 && ranks.rank() == 1;) {
      const Tensor out = Tensor::take(std::vector<int>{-1});
      RANK_CHECK(ranks.recv(out, any_rank, tag) == 0);
      RANK_CHECK(out.view().values<int>()[0] == tag);
    }
    for (Work<void>& each : sent) each.get();
    RANK_CHECK(under_sanitizer || std::chrono::steady_clock::now() - begin < 15s);
    // A receive with a tag may skip older messages of other tags. A wildcard matches the oldest message.
    ranks.barrier();
    for (const int tag : {5, 6, 5})
      if (ranks.rank() == 0) ranks.send(Tensor::take(std::vector<int>{tag}), 1, tag);
    ranks.barrier();
    if (ranks.rank() == 1) {
      RANK_CHECK(ranks.recv_message(0, 6).tag == 6);
      RANK_CHECK(ranks.recv_message(any_rank).tag == 5);
      RANK_CHECK(ranks.recv_message(0).tag == 5);
      RANK_CHECK(!ranks.probe(any_rank));
    }
    ranks.barrier();
    // A sender waits when its receiver keeps too many bytes. At its deadline its error names the receiver.
    std::size_t went = 0;
    const Error error = error_of(ErrorKind::timeout, {"rank 1"}, [&] {
      if (ranks.rank() == 0)
        for (;; ++went) ranks.send(Tensor::take(std::vector<std::uint8_t>(4096)), 1, 0, {.timeout = 500ms});
      (void)ranks.recv_message(0, 1);
    });
    RANK_CHECK(ranks.rank() != 0 || (went >= 32 && went <= 80));
  });
}

TEST_CASE(
    "a finished Work: is_done() remains true, get() may be repeated after it was refused, and a failure remains") {
  run_ranks(2, [](SyncGroup& group) {
    ProcessGroup ranks(group);
    roles::DistributedContext context = roles::initialize_distributed_compute(group, {});
    if (group.rank() == 0) {
      Work<void> sent = ranks.isend(long_tensor(0), 1);
      // While a second thread uses the group, the call is refused, but the message is still sent.
      const auto is_refused = [&](const std::function<void()>& call) {
        try {
          call();
        } catch (const Error& error) {
          return error.kind() == ErrorKind::argument;
        }
        return false;
      };
      std::atomic<bool> is_over{false};
      std::thread user([&] {
        while (is_refused([&] { (void)ranks.recv_message(1, 3); })) continue;
        is_over = true;
      });
      while (!is_over && !is_refused([&] { (void)ranks.probe(1, 4); })) continue;
      const bool is_pending = is_over || (is_refused([&] { sent.get(); }) && sent.is_pending());
      user.join();
      RANK_CHECK(is_pending);
      sent.get();
      RANK_CHECK(!sent.is_pending());
      RANK_CHECK(sent.is_done());
      RANK_CHECK(error_of([&] { sent.get(); }).kind() == ErrorKind::argument);
    } else {
      std::this_thread::sleep_for(500ms);
      (void)ranks.recv_message(0);
      ranks.send(Tensor::take(std::vector<std::uint8_t>(1)), 0, 3);
    }
    // A call on another thread: one thread waits for it while another thread takes the result.
    Work<int> made = ranks.start([](ProcessGroup& own) {
      own.barrier();
      std::this_thread::sleep_for(50ms);
      return 5;
    });
    std::thread waiter([&] { (void)made.wait_for(20s); });
    RANK_CHECK(made.get() == 5);
    waiter.join();
    RANK_CHECK(made.is_done());
    group.barrier();
    if (group.rank() == 0) {
      roles::AsyncSendHandle handle = context.isend(long_tensor(0), 1, 0, {.timeout = 300ms});
      for (int turn = 0; turn < 2; ++turn) {
        RANK_CHECK(error_of([&] { handle.wait(); }).kind() == ErrorKind::timeout);
        RANK_CHECK(!handle.is_complete());
      }
    }
    group.barrier();
  });
}

namespace {

// The last test runs random programs. Each rank has a list of calls. A simulator without buffers decides whether the
// lists complete under MPI's progress rule, and only such programs run.

constexpr int world_size = 4;
/// The ranks of each group in which messages and collectives run.
const std::vector<std::vector<int>> groups = {{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2}, {3, 2, 1}, {0, 3}};

enum class Kind : std::uint8_t { send, isend, recv, irecv, end, collective, plain_send, plain_receive };

struct Step {
  Kind kind = Kind::collective;
  int group = 0;
  int peer = 0;  // rank in the group
  int tag = 0;
  std::int64_t bytes = 0;
  int id = 0;  // number of the message or of the collective call
  int form = 0;
};
using Program = std::vector<std::vector<Step>>;  // by rank

bool is_message(const Step& step) {
  return step.kind != Kind::collective && step.kind != Kind::end;
}
bool is_sent(const Step& step) {
  return step.kind == Kind::send || step.kind == Kind::isend || step.kind == Kind::plain_send;
}
bool is_plain(const Step& step) {
  return step.kind == Kind::plain_send || step.kind == Kind::plain_receive;
}
/// Identifies the messages that the same receives can match.
auto stream_of(const Step& step) {
  return std::tuple(step.group, step.peer, is_plain(step) ? -1 : step.tag, is_sent(step));
}

/// Returns whether every rank completes its list.
bool completes(const Program& program) {
  std::vector<std::size_t> at(program.size(), 0);
  std::map<int, int> posted;  // by message: 1 if it was sent, 2 if its receive was posted, 3 if both
  std::map<int, int> come;    // by collective call: the number of ranks that have called it
  std::vector<std::vector<bool>> counted(program.size());
  for (std::size_t rank = 0; rank < program.size(); ++rank) counted[rank].resize(program[rank].size());
  bool has_moved = true;
  while (std::exchange(has_moved, false))
    for (std::size_t rank = 0; rank < program.size(); ++rank)
      while (at[rank] < program[rank].size()) {
        const Step& step = program[rank][at[rank]];
        if (!counted[rank][at[rank]]) {
          counted[rank][at[rank]] = true;
          has_moved = true;
          if (is_message(step)) posted[step.id] |= is_sent(step) ? 1 : 2;
          if (step.kind == Kind::collective) ++come[step.id];
        }
        const bool is_begun = step.kind == Kind::isend || step.kind == Kind::irecv;
        const bool is_over =
            step.kind == Kind::collective
                ? come[step.id] == static_cast<int>(groups[static_cast<std::size_t>(step.group)].size())
                : is_begun || posted[step.id] == 3;
        if (!is_over) break;
        ++at[rank];
        has_moved = true;
      }
  for (std::size_t rank = 0; rank < program.size(); ++rank)
    if (at[rank] != program[rank].size()) return false;
  return true;
}

Program random_program(std::mt19937_64& random) {
  const auto below = [&](std::size_t count) { return static_cast<int>(random() % count); };
  const std::array<std::int64_t, 11> lengths = {0,       1,       1000,    65'500,  65'536, 65'600,
                                                200'000, 262'100, 262'144, 266'300, 1 << 20};
  Program program(world_size);
  const auto list = [&](int group, int rank) -> std::vector<Step>& {
    return program[static_cast<std::size_t>(groups[static_cast<std::size_t>(group)][static_cast<std::size_t>(rank)])];
  };
  for (int id = 0; id < 24; ++id) {
    const int group = below(groups.size());
    const auto size = groups[static_cast<std::size_t>(group)].size();
    if (below(3) == 0) {
      const Step step{.group = group, .bytes = lengths[static_cast<std::size_t>(below(9))], .id = id, .form = below(7)};
      for (int rank = 0; rank < static_cast<int>(size); ++rank) list(group, rank).push_back(step);
      continue;
    }
    const int from = below(size);
    const int to = (from + 1 + below(size - 1)) % static_cast<int>(size);
    Step step{
        .group = group, .tag = below(2), .bytes = lengths[static_cast<std::size_t>(below(lengths.size()))], .id = id};
    const bool plain = below(6) == 0;
    for (const bool sends : {true, false}) {
      std::vector<Step>& steps = list(group, sends ? from : to);
      const bool begins = !plain && below(3) != 0;
      step.peer = sends ? to : from;
      if (sends) step.kind = plain ? Kind::plain_send : begins ? Kind::isend : Kind::send;
      if (!sends) step.kind = plain ? Kind::plain_receive : begins ? Kind::irecv : Kind::recv;
      steps.push_back(step);
      step.kind = Kind::end;
      if (begins) steps.push_back(step);
    }
  }
  // In this order the calls complete even without progress in other calls. Now neighbouring calls are swapped at random
  // if the program still completes.
  for (int turn = 0; turn < 400; ++turn) {
    std::vector<Step>& steps = program[static_cast<std::size_t>(below(world_size))];
    if (steps.size() < 2) continue;
    const auto at = static_cast<std::size_t>(below(steps.size() - 1));
    Step& first = steps[at];
    Step& second = steps[at + 1];
    if (first.kind == Kind::collective && second.kind == Kind::collective) continue;
    if (first.id == second.id) continue;  // the end of a message stays behind its begin
    if (is_message(first) && is_message(second) && stream_of(first) == stream_of(second)) continue;
    std::swap(first, second);
    if (!completes(program)) std::swap(first, second);
  }
  return program;
}

class Runner {
 public:
  explicit Runner(SyncGroup& world) {
    for (const std::vector<int>& members : groups) {
      plain_.push_back(world.split(std::ranges::find(members, world.rank()) == members.end()
                                       ? RankList(std::vector<int>{})
                                       : RankList(members)));
      ranks_.push_back(plain_.back() ? std::make_unique<ProcessGroup>(*plain_.back()) : nullptr);
    }
  }

  void run(const std::vector<Step>& steps) {
    std::map<int, std::function<void()>> under_way;
    for (const Step& step : steps) {
      ProcessGroup& ranks = *ranks_[static_cast<std::size_t>(step.group)];
      SyncGroup& plain = *plain_[static_cast<std::size_t>(step.group)];
      const auto seed = static_cast<std::uint64_t>(step.id) + 100;
      const Tensor made = is_message(step) && is_sent(step) ? pattern(DType::u8, {step.bytes}, seed)
                                                            : Tensor::allocate(DType::u8, {step.bytes});
      const auto is_right = [made, seed, bytes = step.bytes] { return is_pattern(made, DType::u8, {bytes}, seed); };
      switch (step.kind) {
        case Kind::send:
          ranks.send(made, step.peer, step.tag);
          break;
        case Kind::recv:
          RANK_CHECK(ranks.recv(made, step.peer, step.tag) == step.peer);
          RANK_CHECK(is_right());
          break;
        case Kind::isend:
          under_way[step.id] = end_of_work(ranks.isend(made, step.peer, step.tag), [] { return true; });
          break;
        case Kind::irecv:
          under_way[step.id] = end_of_work(ranks.irecv(made, step.peer, step.tag), is_right);
          break;
        case Kind::end:
          under_way.at(step.id)();
          under_way.erase(step.id);
          break;
        case Kind::plain_send:
          plain.send(step.peer, made.bytes());
          break;
        case Kind::plain_receive: {
          const std::vector<std::byte> got = plain.receive(step.peer, static_cast<std::uint64_t>(step.bytes));
          RANK_CHECK(std::ranges::equal(got, pattern(DType::u8, {step.bytes}, seed).bytes()));
          break;
        }
        case Kind::collective:
          meet(step, ranks, plain);
          break;
      }
    }
  }

 private:
  template <class Result, class Check>
  static std::function<void()> end_of_work(Work<Result> work, Check is_right) {
    return [end = end_of(std::move(work)), is_right] {
      end();
      RANK_CHECK(is_right());
    };
  }

  void meet(const Step& step, ProcessGroup& ranks, SyncGroup& plain) {
    const auto seed = [&](int rank) { return seed_of(rank, static_cast<std::uint64_t>(step.id)); };
    const auto count = static_cast<std::size_t>(ranks.size());
    const Tensor mine = pattern(DType::u8, {step.bytes}, seed(ranks.rank()));
    switch (step.form) {
      case 0:
        return ranks.barrier();
      case 1: {
        const Tensor sum =
            Tensor::take(std::vector<std::int64_t>(static_cast<std::size_t>(step.bytes / 8 + 1), step.id));
        ranks.all_reduce(sum);
        for (const std::int64_t value : sum.view().values<std::int64_t>()) RANK_CHECK(value == step.id * ranks.size());
        return;
      }
      case 2: {
        const Tensor all = ranks.all_gather(mine);
        for (int rank = 0; rank < ranks.size(); ++rank)
          RANK_CHECK(is_pattern(all.view().slice(0, rank * step.bytes, (rank + 1) * step.bytes), DType::u8,
                                {step.bytes}, seed(rank)));
        return;
      }
      case 3: {
        const auto got = get_tensors_parallel(mine, all_ranks, plain);
        for (std::size_t rank = 0; rank < count && plain.rank() == 0; ++rank)
          RANK_CHECK(is_pattern(*got[rank], DType::u8, {step.bytes}, seed(static_cast<int>(rank))));
        return;
      }
      case 4: {
        const auto merged = merge_tensor_parallel(mine, merge::concat(0), all_ranks, plain);
        RANK_CHECK(plain.rank() != 0 || merged.tensor()->shape()[0] == step.bytes * ranks.size());
        return;
      }
      case 5: {
        int parts = 0;
        gather_each(layers_of(plain.rank(), 3), all_ranks, plain, [&](LayerPart&) { ++parts; });
        RANK_CHECK(plain.rank() != 0 || parts >= 3);
        return;
      }
      default:
        return plain.barrier();
    }
  }

  std::vector<std::shared_ptr<SyncGroup>> plain_;
  std::vector<std::unique_ptr<ProcessGroup>> ranks_;
};

std::uint64_t number_in(const char* variable, std::uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace

TEST_CASE("random programs: each one that completes under MPI's progress rule completes, with the right values") {
  const std::uint64_t first = number_in("MUSTER_TEST_SEED", 1);
  const std::uint64_t count = number_in("MUSTER_TEST_PROGRAMS", 20);
  const auto ended = try_ranks(
      world_size,
      [&](SyncGroup& world) {
        Runner runner(world);
        for (std::uint64_t seed = first; seed < first + count; ++seed) {
          std::mt19937_64 random(seed);
          const Program program = random_program(random);
          try {
            runner.run(program[static_cast<std::size_t>(world.rank())]);
          } catch (const std::exception& error) {
            throw RankFailure("MUSTER_TEST_SEED=" + std::to_string(seed) + ": " + error.what());
          }
        }
      },
      std::chrono::seconds(60 + 2 * count));
  check_ended(ended);
}
