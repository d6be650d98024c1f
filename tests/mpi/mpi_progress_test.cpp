// SPDX-License-Identifier: Apache-2.0
// Ranks of two hosts (MUSTER_TEST_GROUP=mpi-2) that work longer than the deadline and report progress do not time out,
// for direct and indirect waits. Ranks that are stalled time out, in any cycle.

#include <thread>

#include "doctest/doctest.h"
#include "tests/support/forked_ranks.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr auto deadline = 1500ms;

void work(Group& group) {
  for (int i = 0; i < 35; ++i) {
    std::this_thread::sleep_for(100ms);
    group.progress();
  }
}

void run(int size, const std::function<void(Group&)>& body) {
  const GroupOf groups(size);
  Ranks ranks(size, [&](int rank) {
    const auto group = groups.join(rank, deadline);
    body(*group);
  });
  check_ended(ranks.wait(40s));
}

void send_word(Group& group, int to) {
  group.send(to, std::as_bytes(std::span(&to, 1)));
}
void receive_word(Group& group, int from) {
  RANK_CHECK(group.receive(from, sizeof(int)).size() == sizeof(int));
}

}  // namespace

TEST_CASE("a round waits for a working rank, wherever it is on its host") {
  for (const int worker : {1, 2, 3}) {
    CAPTURE(worker);
    run(4, [worker](Group& group) {
      if (group.rank() == worker) work(group);
      group.barrier();
    });
  }
}

TEST_CASE("a wait through a rank of the other host also waits for a working rank") {
  run(4, [](Group& group) {
    if (group.rank() == 1) {
      work(group);
      send_word(group, 2);
    }
    if (group.rank() == 2) {
      receive_word(group, 1);
      send_word(group, 0);
    }
    if (group.rank() == 0) receive_word(group, 2);
    if (group.rank() == 3) std::this_thread::sleep_for(4s);
    group.barrier();
  });
}

TEST_CASE("ranks of two hosts that wait for each other in a cycle end at the deadline") {
  const auto begin = std::chrono::steady_clock::now();
  run(4, [](Group& group) {
    error_of(ErrorKind::timeout, {}, [&] {
      // Rank 0 waits for 2, 2 for 1, and 1 for 0 on the same host.
      if (group.rank() == 0) receive_word(group, 2);
      if (group.rank() == 2) receive_word(group, 1);
      if (group.rank() == 1) receive_word(group, 0);
      if (group.rank() == 3) group.barrier();
    });
  });
  CHECK(std::chrono::steady_clock::now() - begin < 10s);
}
