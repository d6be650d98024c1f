// SPDX-License-Identifier: Apache-2.0
// The role of each rank, for all sizes up to 24 ranks and several distributions over hosts. A model that assigns the
// ranks one by one gives the expected roles.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "muster/compat/roles.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::roles;
using namespace muster::test;

namespace {

using Ranks = std::vector<int>;

/// The role of one rank in the model.
struct Seat {
  char role = '-';  // t: training, b: buffer, c: coordinator
  int buffer = -1;
  int group = 0;
  Ranks serves = {};
};

/// A table of all ranks; empty if the layout is impossible.
using Table = std::vector<Seat>;

/// Distributes a line of ranks over `buffers` tables. The sizes differ by at most one, with the larger tables first.
/// The last rank of each table is the manager. Returns false if a manager would be alone.
bool seat(const Ranks& line, int buffers, Table& table) {
  // Distributed in turns, one rank per table.
  std::vector<int> sizes(static_cast<std::size_t>(buffers), 0);
  for (std::size_t i = 0; i < line.size(); ++i) ++sizes[i % sizes.size()];
  std::size_t next = 0;
  for (const int size : sizes) {
    if (size < 2) return false;
    Ranks serves;
    for (int i = 1; i < size; ++i) serves.push_back(line[next++]);
    const int manager = line[next++];
    for (const int rank : serves) table[static_cast<std::size_t>(rank)] = {'t', manager, 0, {}};
    table[static_cast<std::size_t>(manager)] = {'b', -1, 0, serves};
  }
  return true;
}

/// Returns the table for a distribution over hosts. `training` has the training ranks in the order in which agent
/// groups are cut.
Table model(const Ranks& hosts, const RoleSizes& sizes, Ranks& training, bool& by_hosts) {
  const int world = static_cast<int>(hosts.size());
  Table table(hosts.size());
  Ranks line(hosts.size());
  std::iota(line.begin(), line.end(), 0);
  if (sizes.use_coordinator) {
    table.back().role = 'c';
    line.pop_back();
  }
  const std::set<int> distinct(hosts.begin(), hosts.end());
  const int count = static_cast<int>(distinct.size());
  by_hosts = sizes.num_remote_buffers % count == 0;
  Ranks order = line;
  if (sizes.num_remote_buffers == 0) {
    for (const int rank : line) table[static_cast<std::size_t>(rank)].role = 't';
  } else if (by_hosts) {
    order.clear();
    std::set<int> seen;
    for (int first = 0; first < world; ++first) {
      if (!seen.insert(hosts[static_cast<std::size_t>(first)]).second) continue;
      Ranks here;
      for (const int rank : line)
        if (hosts[static_cast<std::size_t>(rank)] == hosts[static_cast<std::size_t>(first)]) here.push_back(rank);
      if (!seat(here, sizes.num_remote_buffers / count, table)) return {};
      order.insert(order.end(), here.begin(), here.end());
    }
  } else if (!seat(line, sizes.num_remote_buffers, table)) {
    return {};
  }
  for (const int rank : order)
    if (table[static_cast<std::size_t>(rank)].role == 't') training.push_back(rank);
  if (training.empty() || training.size() % static_cast<std::size_t>(sizes.num_agent_groups) != 0) return {};
  for (int group = 0; group < sizes.num_agent_groups; ++group)
    for (std::size_t i = 0; i < training.size(); ++i)
      if (i * static_cast<std::size_t>(sizes.num_agent_groups) / training.size() == static_cast<std::size_t>(group))
        table[static_cast<std::size_t>(training[i])].group = group;
  for (Seat& place : table)
    if (place.role == 'b') place.group = table[static_cast<std::size_t>(place.serves[0])].group;
  return table;
}

/// Returns several distributions of `world` ranks over hosts.
std::map<std::string, Ranks> distributions(int world) {
  std::map<std::string, Ranks> all;
  for (int rank = 0; rank < world; ++rank) {
    all["one host"].push_back(7);
    for (const int hosts : {2, 3, 4}) {
      all["blocks on " + std::to_string(hosts)].push_back(100 - rank * hosts / world);
      all["in turns on " + std::to_string(hosts)].push_back(rank % hosts);
    }
    all["one rank each"].push_back(rank);
    all["a first alone"].push_back(rank == 0 ? 5 : 4);
    all["a last alone"].push_back(rank == world - 1 ? 5 : 4);
    all["a third and the rest"].push_back(rank < world / 3 ? 1 : 0);
    all["mixed"].push_back(rank * rank % 5 % 3);
  }
  return all;
}

void check_layout(const RankLayout& layout, const Table& table, const Ranks& training, const RoleSizes& sizes) {
  REQUIRE(layout.world_size == static_cast<int>(table.size()));
  REQUIRE(layout.training_ranks == training);
  REQUIRE(layout.agent_groups.size() == static_cast<std::size_t>(sizes.num_agent_groups));
  REQUIRE(layout.coordinator_rank.has_value() == sizes.use_coordinator);
  REQUIRE(layout.clients_of.size() == layout.buffer_ranks.size());
  for (int rank = 0; rank < layout.world_size; ++rank) {
    const Seat& place = table[static_cast<std::size_t>(rank)];
    const Role role = layout.role(rank);
    REQUIRE((role == Role::training) == (place.role == 't'));
    REQUIRE((role == Role::buffer) == (place.role == 'b'));
    REQUIRE((layout.coordinator_rank == rank) == (place.role == 'c'));
    REQUIRE(layout.assigned_buffer(rank).value_or(-1) == place.buffer);
    REQUIRE(layout.assigned_training_ranks(rank) == place.serves);
    REQUIRE(layout.agent_group_id(rank) == place.group);
    const bool is_listed = std::ranges::find(layout.buffer_ranks, rank) != layout.buffer_ranks.end();
    REQUIRE(is_listed == (place.role == 'b'));
    for (std::size_t group = 0; group < layout.agent_groups.size(); ++group) {
      const Ranks& members = layout.agent_groups[group];
      REQUIRE(static_cast<int>(members.size()) == layout.agent_group_size());
      const bool is_member = std::ranges::find(members, rank) != members.end();
      REQUIRE(is_member == (place.role == 't' && place.group == static_cast<int>(group)));
    }
  }
}

}  // namespace

TEST_CASE("all sizes and hosts, compared with the model") {
  int layouts = 0;
  int errors = 0;
  for (int world = 1; world <= 24; ++world)
    for (const auto& distribution : distributions(world))
      for (int buffers = 0; buffers <= world + 1; ++buffers)
        for (int groups = 1; groups <= world; ++groups)
          for (const bool coordinator : {false, true}) {
            const RoleSizes sizes{buffers, groups, coordinator};
            const Ranks& hosts = distribution.second;
            CAPTURE(distribution.first);
            CAPTURE(world);
            CAPTURE(buffers);
            CAPTURE(groups);
            CAPTURE(coordinator);
            Ranks training;
            bool by_hosts = false;
            const Table table = model(hosts, sizes, training, by_hosts);
            try {
              const RankLayout layout = RankLayout::by_hosts(hosts, sizes);
              REQUIRE(!table.empty());
              check_layout(layout, table, training, sizes);
              REQUIRE(layout.host_agnostic == (buffers != 0 && !by_hosts));
              ++layouts;
            } catch (const Error& error) {
              INFO(error.what());
              REQUIRE(error.kind() == ErrorKind::invalid_argument);
              REQUIRE(table.empty());
              ++errors;
            }
          }
  MESSAGE(layouts << " layouts, " << errors << " errors");
  CHECK(layouts > 10'000);
  CHECK(errors > 10'000);
}

TEST_CASE("the arithmetic layout equals that on one host") {
  for (int world = 1; world <= 24; ++world)
    for (int buffers = 0; buffers <= world / 2; ++buffers)
      for (const bool coordinator : {false, true}) {
        const RoleSizes sizes{buffers, 1, coordinator};
        const Ranks hosts(static_cast<std::size_t>(world), 0);
        Ranks training;
        bool by_hosts = false;
        const Table table = model(hosts, sizes, training, by_hosts);
        if (!table.empty()) check_layout(RankLayout::contiguous(world, sizes), table, training, sizes);
      }
}

TEST_CASE("the layouts drawn in the manual") {
  const RankLayout even = RankLayout::contiguous(8, {.num_remote_buffers = 2, .num_agent_groups = 2});
  CHECK(even.training_ranks == Ranks{0, 1, 2, 4, 5, 6});
  CHECK(even.buffer_ranks == Ranks{3, 7});
  CHECK(even.agent_groups == std::vector<Ranks>{{0, 1, 2}, {4, 5, 6}});
  const RankLayout uneven =
      RankLayout::contiguous(8, {.num_remote_buffers = 2, .num_agent_groups = 1, .use_coordinator = true});
  CHECK(uneven.clients_of == std::vector<Ranks>{{0, 1, 2}, {4, 5}});
  CHECK(uneven.buffer_ranks == Ranks{3, 6});
  CHECK(uneven.coordinator_rank == 7);
  const Ranks hosts = {0, 0, 0, 0, 0, 1, 1, 1};
  const RankLayout by_hosts = RankLayout::by_hosts(hosts, {.num_remote_buffers = 2, .num_agent_groups = 2});
  CHECK(by_hosts.clients_of == std::vector<Ranks>{{0, 1, 2, 3}, {5, 6}});
  CHECK(by_hosts.buffer_ranks == Ranks{4, 7});
  CHECK(by_hosts.agent_groups == std::vector<Ranks>{{0, 1, 2}, {3, 5, 6}});
  CHECK(by_hosts.agent_group_id(7) == 1);
  CHECK(by_hosts.agent_group_size() == 3);
}

TEST_CASE("invalid sizes are refused with the reason") {
  struct Bad {
    Ranks hosts;
    RoleSizes sizes;
    const char* words;
  };
  const Bad all[] = {
      {{0, 0}, {-1, 1, false}, "-1 remote buffers"},
      {{0, 0}, {0, 0, false}, "0 agent groups"},
      {{}, {0, 1, false}, "no training rank"},
      {{0}, {0, 1, true}, "no training rank"},
      {{0}, {1, 1, false}, "1 ranks with 1 remote buffers and no coordinator leave no training rank"},
      {{0, 0, 0}, {2147483647, 1, true}, "no training rank"},
      {{0, 0, 0, 0, 0}, {3, 1, false}, "leave 2 training ranks: each buffer needs at least one"},
      {{0, 0, 0, 0, 0, 0, 0}, {1, 4, false}, "6 training ranks, which is not a multiple of 4 agent groups"},
      {{0, 0, 0, 1}, {2, 1, false}, "the host of rank 3 has 1"},
      {{0, 0, 0, 0, 1}, {2, 1, true}, "the host of rank 4 has 0"},
  };
  for (const Bad& bad : all) {
    CAPTURE(bad.words);
    CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)RankLayout::by_hosts(bad.hosts, bad.sizes); }),
              bad.words));
  }
  const RankLayout layout = RankLayout::contiguous(2, {});
  CHECK(has(words_of(ErrorKind::invalid_argument, [&] { (void)layout.role(2); }), "rank 2 is out of range for size 2"));
  CHECK(
      has(words_of(ErrorKind::invalid_argument, [&] { (void)layout.agent_group_id(-1); }), "rank -1 is out of range"));
}

TEST_CASE("the first environment variable that is set") {
  ::unsetenv("MUSTER_TEST_A");
  ::setenv("MUSTER_TEST_B", "", 1);
  ::setenv("MUSTER_TEST_C", "3", 1);
  ::setenv("MUSTER_TEST_D", "4", 1);
  CHECK(first_env({"MUSTER_TEST_A", "MUSTER_TEST_B", "MUSTER_TEST_C", "MUSTER_TEST_D"}) == "3");
  CHECK(first_env({"MUSTER_TEST_A", "MUSTER_TEST_B"}, "none") == "none");
  CHECK(first_env({"MUSTER_TEST_A"}) == std::nullopt);
  CHECK(first_env({}) == std::nullopt);
}
