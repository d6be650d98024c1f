// SPDX-License-Identifier: Apache-2.0
// The route of lists with one rank: no data is sent.

#include <array>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/merge_gather.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;

TEST_CASE("the world of one process gathers from itself") {
  const auto group = single_group();
  const Config mine = Config::object({{"rank", 0}, {"weight", Tensor::allocate(DType::f32, {3, 5})}});
  const GatheredConfigs all = get_configs_parallel(&mine, std::vector<int>{0}, *group);
  REQUIRE(all.size() == 1);
  CHECK(*all[0] == mine);
  CHECK(all.report().route == Route::local);
  CHECK_THROWS_AS((void)get_configs_parallel(&mine, std::vector<int>{0}, *group, {.route = Route::shm}), Error);
}

TEST_CASE("a list of ranks is printed in full, or as all ranks") {
  const auto group = single_group();
  const Tensor mine = pattern(DType::f32, {4}, 1);
  const std::array<int, 1> array = {0};
  for (const GatheredTensors& gathered :
       {get_tensors_parallel(mine, {0}, *group), get_tensors_parallel(mine, all_ranks, *group),
        get_tensors_parallel(mine, array, *group), get_tensors_parallel(mine, std::span<const int>(array), *group)}) {
    CHECK(gathered.ranks() == std::vector<int>{0});
    CHECK(bitwise_equal(*gathered[0], mine));
  }
  CHECK(get_tensors_parallel(mine, {}, *group).ranks().empty());
  CHECK(merge_tensor_parallel(mine, merge::stack(), {0}, *group).tensor()->shape() == Shape{1, 4});
  set_world(group);
  const Config config = 1;
  CHECK(get_tensors_parallel(mine).size() == 1);
  CHECK(get_configs_parallel(&config).size() == 1);
  CHECK(merge_tensor_parallel(mine, merge::sum()).tensor().has_value());
  set_world(nullptr);
}

TEST_CASE("explain() reports the rounds, also after the result has been released") {
  const auto group = single_group();
  const Config mine = Config::object({{"rank", 0}});
  GatheredConfigs all = get_configs_parallel(&mine, std::vector<int>{0}, *group);
  const std::string words = all.explain();
  CHECK(words.find(", 1 round;") != std::string::npos);
  CHECK(words.find("round 1") != std::string::npos);
  CHECK(words.find("round 2") == std::string::npos);
  all.release();
  CHECK(all.empty());
  CHECK(all.explain() == words);
  const GatheredConfigs outside = get_configs_parallel(nullptr, {}, *group);
  CHECK(outside.explain() == "in no list: took part in the rounds only");
}

TEST_CASE("the world of one process merges with itself") {
  const auto group = single_group();
  const Tensor mine = pattern(DType::f32, {4, 6}, 1);
  for (const Merge& merge :
       {merge::concat(1), merge::concat_blocks(0, {1, 1}), merge::sum(), merge::max(), merge::same(), merge::first()}) {
    const MergeResult merged = merge_tensor_parallel(mine, merge, std::vector<int>{0}, *group);
    CHECK(bitwise_equal(*merged.tensor(), mine));
    CHECK(merged.report().route == Route::local);
  }
  const TensorView strided = mine.view().transposed();
  const MergeResult stacked = merge_tensor_parallel(strided, merge::stack(), std::vector<int>{0}, *group);
  CHECK(stacked.tensor()->shape() == Shape{1, 6, 4});
  CHECK(bitwise_equal(stacked.tensor()->view().slice(0, 0, 1), stacked.tensor()->view()));
  CHECK_THROWS_AS((void)merge_tensor_parallel(mine, merge::concat(2), std::vector<int>{0}, *group), Error);
}
