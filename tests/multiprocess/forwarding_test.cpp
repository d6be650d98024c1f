// SPDX-License-Identifier: Apache-2.0
// Packets that pass through gateways of their hosts (src/multihost/forwarding.hpp). 48 ranks on six hosts.

#include <signal.h>

#include <map>
#include <memory>

#include "doctest/doctest.h"
#include "muster/live_export.hpp"
#include "src/group/group.hpp"
#include "src/group/mail.hpp"
#include "src/multihost/forwarding.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/open_sockets.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr int number_of_ranks = 48;

/// Lets the ranks that are started in its lifetime forward packets, although they are few.
struct FewRanksForward {
  FewRanksForward() { multihost::Forwarding::most_direct = 32; }
  ~FewRanksForward() { multihost::Forwarding::most_direct = before; }
  FewRanksForward& operator=(FewRanksForward&&) = delete;
  const std::size_t before = multihost::Forwarding::most_direct;
};

std::shared_ptr<group::BaseGroup> forwarding_companion(Group& group) {
  auto companion = group::inside(group).companion();
  companion->forward_packets();
  companion->barrier();
  return companion;
}

/// Exchanges messages of several lengths with the ranks `distance` before and after this one.
void exchange(group::BaseGroup& group, int distance, int turn) {
  const int to = (group.rank() + distance) % group.size();
  const int from = (group.rank() - distance + group.size()) % group.size();
  // An empty one, one packet, eager packets, and one whose body is requested.
  const std::int64_t lengths[] = {0, 1000 + turn, 70'000, 200'000, 900'000};
  const auto seed = [&](int rank, std::int64_t bytes) {
    return static_cast<std::uint64_t>(rank * 1000 + distance + turn) + static_cast<std::uint64_t>(bytes);
  };
  const group::GroupLock use(group);
  group::Mail& mail = group.mail();
  const auto tag = static_cast<std::int64_t>(group::Subject::exchange);
  std::vector<Tensor> sent;
  std::vector<std::shared_ptr<group::Mail::OutgoingMail>> sending;
  for (const std::int64_t bytes : lengths) {
    sent.push_back(pattern(DType::u8, {bytes}, seed(group.rank(), bytes)));
    sending.push_back(mail.send({.to = to, .tag = tag, .body = {sent.back().data(), sent.back().nbytes()}}));
  }
  for (const std::int64_t bytes : lengths) {
    Tensor received = Tensor::allocate(DType::u8, {bytes});
    const auto place = [&](const group::Envelope& envelope) {
      RANK_CHECK(envelope.bytes == received.nbytes());
      return std::span(received.mutable_data(), received.nbytes());
    };
    const auto receiving = mail.receive({.from = from, .tag = tag, .place = place});
    mail.wait([&] { return receiving->is_done.load(); }, from, {.phase = "test: receiving"});
    RANK_CHECK(is_pattern(received, DType::u8, {bytes}, seed(from, bytes)));
  }
  for (const auto& each : sending) mail.wait([&] { return each->is_done.load(); }, to, {.phase = "test: sending"});
}

/// Each rank provides eight rows of each tensor. Returns the error of the first export that fails.
Error export_until_failure(Group& group, const std::string& out) {
  const Shape whole{8 * std::int64_t{group.size()}, 64};
  std::vector<TensorPart> parts;
  for (const char* name : {"a", "b", "c"})
    parts.push_back({name, pattern(DType::u8, {8, 64}, 1), whole, {8 * std::int64_t{group.rank()}, 0}});
  return error_of([&] {
    for (;;) export_model(parts, out, "", group, {.force = true, .max_shard_size = 30'000});
  });
}

}  // namespace

TEST_CASE("messages between all ranks of six hosts arrive in order, byte by byte") {
  const FewRanksForward few;
  run_ranks(number_of_ranks, [](Group& group) {
    const auto forwarding = forwarding_companion(group);
    const std::size_t before = open_sockets();
    for (const int distance : {1, 7, 8, 20, 24, 47})
      for (int turn = 0; turn < 2; ++turn) exchange(*forwarding, distance, turn);
    // A rank has exchanged messages with ten ranks of other hosts.
    if (group.kind() == "tcp") RANK_CHECK(open_sockets() <= before + 6);
    // Messages pass through ranks that wait for others, or for a round of another group.
    if (group.rank() % 8 == 3) exchange(*forwarding, 16, 9);
    if (group.rank() % 8 == 4) exchange(*forwarding, 8, 9);
    group.barrier();
  });
}

TEST_CASE("an export to whose files all ranks of six hosts contribute") {
  const FewRanksForward few;
  const TemporaryDirectory work(Medium::memory);
  run_ranks(number_of_ranks, [&](Group& group) {
    const std::int64_t side = 24 * std::int64_t{group.size()};
    const std::int64_t begin = 24 * std::int64_t{group.rank()};
    std::map<std::string, Tensor> wholes;
    std::vector<TensorPart> parts;
    for (int number = 0; number < 5; ++number) {
      const int axis = number % 2;
      const std::string name = "tensor" + std::to_string(number);
      const Tensor whole =
          pattern(DType::u8, axis == 0 ? Shape{side, 1024} : Shape{1024, side}, static_cast<std::uint64_t>(number));
      parts.push_back({name, Tensor::copy_of(whole.view().slice(static_cast<std::size_t>(axis), begin, begin + 24)),
                       whole.shape(), axis == 0 ? Shape{begin, 0} : Shape{0, begin}});
      wholes.emplace(name, whole);
    }
    for (const Writers writers : {Writers::all, Writers::rank0}) {
      export_model(parts, work / "out", "", group,
                   {.force = true, .max_shard_size = 2'500'000, .memory_budget = 64 << 20, .writers = writers});
      if (group.rank() != 0) continue;
      const auto found = tensors_of(work / "out");
      RANK_CHECK(found.size() == wholes.size());
      for (const auto& [name, whole] : wholes) RANK_CHECK(bitwise_equal(found.at(name), whole));
    }
  });
}

TEST_CASE("a rank that dies during exports is named by all other ranks") {
  const FewRanksForward few;
  const TemporaryDirectory work(Medium::memory);
  for (const int victim : {0, 13, 16}) {
    CAPTURE(victim);
    const auto ended = try_ranks(
        number_of_ranks,
        [&](Group& group) {
          if (group.rank() == victim) kill_self_after(400ms);
          const Error error = export_until_failure(group, work / "out");
          if (error.rank() != victim) throw RankFailure("another rank is blamed: " + std::string(error.what()));
        },
        60s);
    check_ended(ended, {victim});
  }
}

TEST_CASE("a rank that is stopped during exports is named at the deadline") {
  const FewRanksForward few;
  const int victim = 21;
  const TemporaryDirectory work(Medium::memory);
  const GroupOf job(number_of_ranks);
  Ranks processes(number_of_ranks, [&](int rank) {
    const auto group = job.join(rank);
    group->barrier();
    group->set_timeout(2s);
    if (rank == victim) kill_self_after(400ms, SIGSTOP);
    const Error error = export_until_failure(*group, work / "out");
    if (error.rank() != victim) throw RankFailure("another rank is blamed: " + std::string(error.what()));
  });
  check_ended(processes.wait_and_kill(victim, 20s), {victim});
}
