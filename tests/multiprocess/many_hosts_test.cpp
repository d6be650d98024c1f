// SPDX-License-Identifier: Apache-2.0
// The root of a round's tree can have only some of the hosts as direct children; here there are more hosts. Records
// must reach all ranks in order, and the missing rank must be named. The properties of the tree hold for any number of
// hosts.

#include <algorithm>
#include <csignal>
#include <numeric>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "src/checkpoint/assembly/rank_messages.hpp"
#include "src/gather/record.hpp"
#include "src/group/group.hpp"
#include "src/multihost/hosts.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;
using multihost::HostTree;

namespace {

constexpr int ranks = 13;  // two ranks share the first host

}  // namespace

TEST_CASE("a tree contains every host once, below its parent") {
  for (const int hosts : {1, 2, 3, 9, 10, 17, 73, 74, 512, 1000}) {
    const HostTree tree{hosts};
    CAPTURE(hosts);
    std::vector<int> all = tree.with_all_below(0);
    CHECK(all.front() == 0);
    std::ranges::sort(all);
    std::vector<int> each(static_cast<std::size_t>(hosts));
    std::iota(each.begin(), each.end(), 0);
    CHECK(all == each);
    int deepest = 0;
    for (int host = 0; host < hosts; ++host) {
      const std::vector<int> children = tree.children(host);
      REQUIRE(children.size() <= static_cast<std::size_t>(HostTree::most_children));
      int highest = -1;
      for (const int child : children) {
        REQUIRE(tree.parent(child) == host);
        REQUIRE(tree.depth(child) == tree.depth(host) + 1);
        highest = std::max(highest, tree.height(child));
      }
      REQUIRE(tree.height(host) == highest + 1);
      deepest = std::max(deepest, tree.depth(host));
    }
    CHECK(tree.height(0) == deepest);
  }
  // The waits of a group depend on these heights. With few hosts the tree is a hub.
  CHECK(HostTree{9}.height(0) == 1);
  CHECK(HostTree{10}.height(0) == 2);
  CHECK(HostTree{512}.height(0) == 3);
}

TEST_CASE("rounds, gathers and duplicates over twelve hosts") {
  run_ranks(ranks, [](Group& group) {
    for (int turn = 0; turn < 20; ++turn) {
      const std::array<int, 3> mine = {group.rank(), turn, group.rank() * turn};
      std::vector<std::array<int, 3>> all(ranks);
      group.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
      for (int rank = 0; rank < ranks; ++rank)
        RANK_CHECK((all[static_cast<std::size_t>(rank)] == std::array<int, 3>{rank, turn, rank * turn}));
      group.barrier();
    }
    const auto other = group.duplicate();
    for (const int first : {0, 11}) gather_and_check(*other, ranks_from(first, ranks), 800, 0);
  });
}

TEST_CASE("messages of all ranks to rank 0, and of rank 0 to each rank") {
  const auto message_of = [](int rank, int turn) {
    return std::vector<std::byte>(static_cast<std::size_t>((rank * 7919 + turn) % 5 * 30'000),
                                  static_cast<std::byte>(rank + turn));
  };
  for (const int size : {1, 2, ranks})
    run_ranks(size, [&](Group& group) {
      group::BaseGroup& inside = group::inside(group);
      for (int turn = 0; turn < 5; ++turn) {
        auto all = gather_messages(inside, message_of(group.rank(), turn), {});
        RANK_CHECK(all.size() == (group.rank() == 0 ? static_cast<std::size_t>(size) : 0));
        for (std::size_t rank = 0; rank < all.size(); ++rank)
          RANK_CHECK((all[rank] == message_of(static_cast<int>(rank), turn)));
        const std::vector<std::byte> mine = scatter_messages(inside, std::move(all), {});
        RANK_CHECK((mine == message_of(group.rank(), turn)));
      }
    });
}

TEST_CASE("several lists at once, of ranks on any hosts") {
  run_ranks(ranks, [](Group& group) {
    // Ranks 4 and 9 are in no list. Lists of one host, of neighbours in the tree, and of hosts below different ones.
    const std::vector<std::vector<int>> lists = {{1, 0}, {12, 3, 8}, {2}, {11, 10, 5, 6, 7}};
    std::vector<int> own;
    for (const std::vector<int>& list : lists)
      if (std::ranges::find(list, group.rank()) != list.end()) own = list;
    const Tensor tensor = pattern(DType::u8, {5000}, static_cast<std::uint64_t>(group.rank()));
    for (int turn = 0; turn < 5; ++turn) {
      const GatheredTensors gathered = get_tensors_parallel(tensor, own, group);
      const bool is_root = !own.empty() && own.front() == group.rank();
      RANK_CHECK(gathered.size() == (is_root ? own.size() : 0));
      for (std::size_t i = 0; i < gathered.size(); ++i)
        RANK_CHECK(is_pattern(*gathered[i], DType::u8, {5000}, static_cast<std::uint64_t>(own[i])));
      const MergeResult merged = merge_tensor_parallel(tensor, merge::concat(0), own, group);
      if (is_root) RANK_CHECK((merged.tensor()->shape() == Shape{5000 * static_cast<std::int64_t>(own.size())}));
      std::uint64_t layers = 0;
      const auto source = [&, next = 0]() mutable -> std::optional<Config> {
        if (next++ == 3) return std::nullopt;
        return Config(tensor);
      };
      gather_each(source, own, group, [&](LayerPart& part) {
        RANK_CHECK(part.present().size() == own.size());
        ++layers;
      });
      RANK_CHECK(layers == (is_root ? 3U : 0U));
    }
  });
}

TEST_CASE("a rank on the last host that fails or passes another list is named on all ranks") {
  run_ranks(ranks, [](Group& group) {
    const bool is_last = group.rank() == ranks - 1;
    const std::vector<int> all = ranks_from(0, ranks);
    const Config config = Config::object({{"rank", group.rank()}});
    const auto gather = [&](const std::vector<int>& list) { (void)get_configs_parallel(&config, list, group); };
    fails_alike(group, ErrorKind::rank_mismatch, {"rank 12 [12, 0]", "rank 3 [0, 1, 2"}, [&] {
      gather(is_last ? std::vector{12, 0} : all);
    });
    fails_alike(group, ErrorKind::invalid_argument, {"rank 12 (host", "rank 99 is out of range"},
                [&] { gather(is_last ? std::vector{99} : all); });
    // The list has other ranks only, and a rank in no list fails.
    fails_alike(group, ErrorKind::invalid_argument, {"rank 12 (host", "rank 5 occurs twice"}, [&] {
      gather(is_last ? std::vector{5, 5} : std::vector{1, 2, 3});
    });
    // Each rank puts its own call before the common text.
    error_of(ErrorKind::rank_mismatch, {"different calls", "rank 12 gather_each"}, [&] {
      if (!is_last) return gather(all);
      gather_each([] { return std::optional<Config>(); }, all, group, [](LayerPart&) {});
    });
    gather_and_check(group, all, 800, 0);
  });
}

namespace {

/// The messages to other hosts have two bytes, which no call of the library sends.
class OddFold final : public group::HostFold {
 public:
  void begin(std::span<const int>, std::span<const std::byte>) override {}
  void take_below(std::span<const std::byte>) override {}
  void up(Bytes& out) override { out.resize(out.size() + 2); }
  void take_above(std::span<const std::byte>) override {}
  void down(std::size_t, Bytes& out) const override { out.resize(out.size() + 2); }
};

}  // namespace

TEST_CASE("a malformed message of a round is reported in the name of its sender") {
  // The last host is below another one than the top host. The root sends down to all.
  for (const int sender : {ranks - 1, 0})
    for (const bool is_gather : {false, true}) {
      CAPTURE(sender);
      CAPTURE(is_gather);
      const std::vector<Ended> all = try_ranks(ranks, [&](Group& group) {
        const Error error = error_of(
            ErrorKind::corrupt,
            {"rank " + std::to_string(sender) + " (host ", "malformed message of a round", "Use one build of Muster"},
            [&] {
              const std::vector<std::byte> record(is_gather ? sizeof(gather::ExchangeRecord) : 1);
              const Config config = Config::object({{"rank", group.rank()}});
              OddFold odd;
              if (group.rank() == sender)
                (void)group::inside(group).fold(record, odd, {});
              else if (is_gather)
                (void)get_configs_parallel(&config, ranks_from(0, ranks), group);
              else
                (void)group::inside(group).any(false, {});
              group.barrier();
            });
        RANK_CHECK(error.rank() == sender);
      });
      check_ended(all);
    }
}

TEST_CASE("ranks in different calls get an error, on whichever host they are") {
  const std::vector<Ended> all = try_ranks(ranks, [](Group& group) {
    error_of(ErrorKind::rank_mismatch, {}, [&] {
      std::array<std::byte, 8> mine{};
      std::vector<std::byte> records(8 * ranks);
      if (group.rank() == 12)
        group.barrier();
      else
        group.all_gather(mine, records);
    });
    RANK_CHECK(group.error());
  });
  // A rank that has not yet left the rendezvous receives the error there.
  for (const Ended& ended : all)
    CHECK_MESSAGE((ended.ok() || ended.words.find("different calls") != std::string::npos), ended.words);
}

TEST_CASE("a host that stops, below another host, is named by all ranks at the deadline") {
  constexpr int victim = 12;  // on the last host, which is not a direct child of the root
  const GroupOf group(ranks);
  Ranks processes(ranks, [&](int rank) {
    const auto mine = group.join(rank);
    mine->barrier();
    mine->set_timeout(std::chrono::milliseconds(1500));
    if (rank == victim) ::raise(SIGSTOP);
    const auto begin = std::chrono::steady_clock::now();
    const Error error = error_of(ErrorKind::timeout, {}, [&] { mine->barrier(); });
    if (error.rank() != victim) throw RankFailure(std::string("another one is blamed: ") + error.what());
    // The deadline, two seconds, and a reserve for a busy machine.
    RANK_CHECK(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(1500 + 2000 + 2000));
  });
  check_ended(processes.wait_and_kill(victim, std::chrono::seconds(5)), {victim});
}
