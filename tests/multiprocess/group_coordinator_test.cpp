// SPDX-License-Identifier: Apache-2.0
// The groups of a model's ranks: their members, the defaults of their calls, and dicts from stage to stage.

#include "muster/compat/group_coordinator.hpp"

#include <algorithm>

#include "doctest/doctest.h"
#include "src/group/region.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;

namespace {

Tensor numbers(std::vector<float> values, Shape shape) {
  return Tensor::take(std::move(values), std::move(shape));
}

void check(const TensorView& tensor, const Shape& shape, const std::vector<float>& values) {
  RANK_CHECK(tensor.shape() == shape);
  RANK_CHECK(std::ranges::equal(tensor.values<float>(), values));
}

/// Six ranks as two groups of three, and as three groups of two.
const std::vector<std::vector<int>> two_rows = {{0, 1, 2}, {3, 4, 5}};
const std::vector<std::vector<int>> columns = {{0, 3}, {1, 4}, {2, 5}};

}  // namespace

TEST_CASE("the ranks of a group, its ends, neighbours and unique name") {
  run_ranks(6, [](Group& world) {
    const int self = world.rank();
    GroupCoordinator group(columns, world, "pp");
    GroupCoordinator again(columns, world, "pp");
    RANK_CHECK(group.rank() == self);
    RANK_CHECK(group.ranks() == columns[static_cast<std::size_t>(self % 3)]);
    RANK_CHECK(group.rank_in_group() == self / 3);
    RANK_CHECK(group.world_size() == 2);
    RANK_CHECK(group.first_rank() == self % 3);
    RANK_CHECK(group.last_rank() == self % 3 + 3);
    RANK_CHECK(group.is_first_rank() == (self < 3));
    RANK_CHECK(group.is_last_rank() == (self >= 3));
    RANK_CHECK(group.next_rank() == (self + 3) % 6);
    RANK_CHECK(group.prev_rank() == (self + 3) % 6);
    RANK_CHECK(group.unique_name() != again.unique_name());
    RANK_CHECK(group.unique_name().starts_with("pp:"));
    for (const auto& bad : {std::vector<std::vector<int>>{{0, 1, 2}, {3, 4}},
                            {{0, 1, 2, 3}, {3, 4, 5}},
                            {{0, 1, 2}, {3, 4, 6}},
                            {{0, 1, 2, 3, 4, 5, -1}}})
      error_of(ErrorKind::invalid_argument, {"each of the 6 ranks once"}, [&] { GroupCoordinator(bad, world, "bad"); });
    error_of(ErrorKind::rank_mismatch, {"different lists"},
             [&] { GroupCoordinator(self == 4 ? columns : two_rows, world, "bad"); });
  });
}

TEST_CASE("the calls, with their defaults, in groups of three beside each other") {
  run_ranks(6, [](Group& world) {
    GroupCoordinator group(two_rows, world, "tp");
    const auto me = static_cast<float>(group.rank_in_group());
    const Tensor mine = numbers({me, me + 10, me + 20, me + 30}, {2, 2});
    check(group.all_reduce(mine), {2, 2}, {3, 33, 63, 93});
    check(mine, {2, 2}, {me, me + 10, me + 20, me + 30});
    // The default is the last dimension.
    check(group.all_gather(mine), {2, 6}, {0, 10, 1, 11, 2, 12, 20, 30, 21, 31, 22, 32});
    check(group.all_gather(mine, 0), {6, 2}, {0, 10, 20, 30, 1, 11, 21, 31, 2, 12, 22, 32});
    const std::vector<std::int64_t> sizes = {1, 2, 3};
    const auto extent = static_cast<std::int64_t>(me) + 1;
    const Tensor uneven = numbers(std::vector<float>(static_cast<std::size_t>(extent * 2), me), {extent, 2});
    const std::vector<float> all = {0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2};
    check(group.all_gatherv(uneven, 0, sizes), {6, 2}, all);
    const std::vector<TensorView> both = {uneven.view(), uneven.view()};
    for (const Tensor& tensor : group.all_gatherv(both)) check(tensor, {6, 2}, all);
    error_of(ErrorKind::invalid_argument, {"sizes"},
             [&] { (void)group.all_gatherv(uneven, 0, std::vector<std::int64_t>{1}); });
    // Three dimensions, of which the last one is scattered.
    std::vector<float> cube;
    for (int i = 0; i < 12; ++i) cube.push_back(static_cast<float>(i));
    const Tensor block = numbers(cube, {2, 2, 3});
    check(group.reduce_scatter(block), {2, 2, 1}, {3 * me, 3 * me + 9, 3 * me + 18, 3 * me + 27});
    check(group.reduce_scatterv(numbers(std::vector<float>(6, 1), {1, 6}), sizes), {1, extent},
          std::vector<float>(static_cast<std::size_t>(extent), 3));
    const auto gathered = group.gather(mine, 1, 0);
    RANK_CHECK(gathered.has_value() == (group.rank_in_group() == 1));
    if (gathered) check(*gathered, {6, 2}, {0, 10, 20, 30, 1, 11, 21, 31, 2, 12, 22, 32});
    const Tensor given = numbers({me, me}, {2});
    group.broadcast(given, 2);
    check(given, {2}, {2, 2});
    const Config object = group.broadcast_object(group.is_first_rank() ? Config::array({1, "x"}) : Config());
    RANK_CHECK(object == Config::array({1, "x"}));
    group.barrier();
    error_of(ErrorKind::invalid_argument, {"root -1"}, [&] { group.broadcast(given, -1); });
    error_of(ErrorKind::invalid_argument, {"root 3"}, [&] { (void)group.broadcast_object({}, 3); });
  });
}

TEST_CASE("the results of a group of one rank have their own memory") {
  run_ranks(2, [](Group& world) {
    GroupCoordinator group(std::vector<std::vector<int>>{{0}, {1}}, world, "dp");
    const Tensor mine = numbers({1, 2, 3, 4}, {2, 2});
    for (const Tensor& tensor : {group.all_reduce(mine), group.all_gather(mine), group.reduce_scatter(mine),
                                 *group.gather(mine), group.all_gatherv(mine)}) {
      check(tensor, {2, 2}, {1, 2, 3, 4});
      RANK_CHECK(tensor.data() != mine.data());
    }
    error_of(ErrorKind::invalid_argument, {"itself"}, [&] { group.send(mine); });
  });
}

TEST_CASE("dicts, to all and from stage to stage, in slices or whole") {
  run_ranks(6, [](Group& world) {
    GroupCoordinator stages(columns, world, "pp");
    GroupCoordinator tensor_parallel(two_rows, world, "tp");
    ConfigObject dict;
    dict["whole"] = pattern(DType::bf16, {5, 7}, 1);
    dict["sliced"] = pattern(DType::f32, {3, 4}, 2);
    dict["kept whole"] = pattern(DType::u8, {6}, 3);
    dict["empty"] = Tensor::allocate(DType::f32, {0, 3});
    dict["step"] = 7;
    dict["names"] = Config::array({"a", Config::object({{"b", 1}})});
    const auto is_dict = [&](const ConfigObject& received) { RANK_CHECK(Config(received) == Config(dict)); };
    is_dict(tensor_parallel.broadcast_tensor_dict(tensor_parallel.rank_in_group() == 2 ? dict : ConfigObject(), 2));
    const GroupCoordinator::TensorDictOptions options{&tensor_parallel, {{"kept whole", false}}, {}};
    if (stages.is_first_rank()) {
      stages.send_tensor_dict(dict);
      stages.send_tensor_dict(dict, 1, options);
      stages.send_object("now", 1);
      stages.send(pattern(DType::i16, {9}, 4));
      error_of(ErrorKind::invalid_argument, {"tensor \"whole\": its 35 elements"}, [&] {
        stages.send_tensor_dict(dict, 1, {&tensor_parallel, {{"whole", true}}, {}});
      });
    } else {
      is_dict(stages.recv_tensor_dict());
      is_dict(stages.recv_tensor_dict(0, options));
      RANK_CHECK(stages.recv_object(0) == Config("now"));
      RANK_CHECK(is_pattern(stages.recv({DType::i16, {9}}), DType::i16, {9}, 4));
    }
  });
}

TEST_CASE("slices of a dict that do not match, and other messages, are rank_mismatch on all ranks") {
  run_ranks(6, [](Group& world) {
    const bool sends = world.rank() < 4;
    GroupCoordinator stage(std::vector<std::vector<int>>{{0, 1, 2, 3}, {4, 5}}, world, "tp");
    GroupCoordinator stages(std::vector<std::vector<int>>{{0, 4}, {1, 5}, {2}, {3}}, world, "pp");
    GroupCoordinator halves(std::vector<std::vector<int>>{{0, 1}, {2, 3}, {4, 5}}, world, "half");
    if (stages.world_size() == 1) return;
    const bool is_second = stage.rank_in_group() == 1;
    const auto dict_of = [](const std::vector<std::string>& keys) {
      ConfigObject dict;
      for (const std::string& key : keys) dict[key] = pattern(DType::u8, {400}, key.front());
      return dict;
    };
    const auto refused = [&](const std::string& words) {
      error_of(ErrorKind::rank_mismatch, {words},
               [&] { (void)stages.recv_tensor_dict(0, {.all_gather_group = &halves}); });
    };
    // The receivers' group is smaller than the senders' group.
    if (sends) stages.send_tensor_dict(dict_of({"a"}), 1, {.all_gather_group = &stage});
    if (!sends) refused(" of 4, but slice ");
    // One of the two senders sends another message.
    if (sends && is_second) stages.send_object("now", 1);
    if (sends && !is_second) stages.send_tensor_dict(dict_of({"a"}), 1, {.all_gather_group = &halves});
    if (!sends) refused("a message that is not a dict of tensors");
    // Two dicts with different keys, and two with a different order.
    if (sends) stages.send_tensor_dict(dict_of({"a", is_second ? "b" : "c"}), 1, {.all_gather_group = &halves});
    if (!sends) refused("Send the same tensors");
    const std::vector<std::string> keys =
        is_second ? std::vector<std::string>{"b", "a"} : std::vector<std::string>{"a", "b"};
    if (sends) stages.send_tensor_dict(dict_of(keys), 1, {.all_gather_group = &halves});
    if (!sends) RANK_CHECK(Config(stages.recv_tensor_dict(0, {.all_gather_group = &halves})) == Config(dict_of(keys)));
  });
}

TEST_CASE("a mixture of experts: rows are sent to all ranks, and the sums are returned") {
  run_ranks(3, [](Group& world) {
    GroupCoordinator group(std::vector<std::vector<int>>{{0, 1, 2}}, world, "ep");
    const auto me = static_cast<float>(world.rank());
    const std::int64_t mine = world.rank() * 2;  // rank 0 has no rows
    const Tensor hidden = numbers(std::vector<float>(static_cast<std::size_t>(mine * 4), me), {mine, 4});
    const Tensor logits = numbers(std::vector<float>(static_cast<std::size_t>(mine * 2), me + 5), {mine, 2});
    const std::vector<TensorView> both = {hidden.view(), logits.view()};
    const GroupCoordinator::Dispatched all = group.dispatch(both);
    RANK_CHECK((all.sizes == std::vector<std::int64_t>{0, 2, 4}));
    std::vector<float> values(8, 1);
    values.resize(24, 2);
    check(all.tensors[0], {6, 4}, values);
    RANK_CHECK((all.tensors[1].shape() == Shape{6, 2}));
    check(group.combine(all.tensors[0], all.sizes), {mine, 4},
          std::vector<float>(static_cast<std::size_t>(mine * 4), 3 * me));
  });
}

TEST_CASE("objects through a queue, which only the root writes") {
  run_ranks(6, [](Group& world) {
    GroupCoordinator group(two_rows, world, "tp", {.use_message_queue_broadcaster = true});
    const Config large = Config::object({{"weights", pattern(DType::f32, {50000}, 1)}});
    for (int i = 0; i < 100; ++i) {
      RANK_CHECK(group.broadcast_object(group.is_first_rank() ? Config(i) : Config()) == Config(i));
      if (i % 10 == 0) RANK_CHECK(group.broadcast_object(group.is_first_rank() ? large : Config()) == large);
      // An object from this rank is not sent through the queue.
      if (i % 25 == 0) RANK_CHECK(group.broadcast_object(group.is_last_rank() ? large : Config(), 2) == large);
    }
    error_of(ErrorKind::rank_mismatch, {"options"},
             [&] { GroupCoordinator(two_rows, world, "tp", {.use_message_queue_broadcaster = world.rank() == 0}); });
  });
}

TEST_CASE("queues: from one rank to all, from a process outside the group, from each rank to one") {
  const std::string handle = make_queue_handle(3);
  const GroupOf groups(6);
  Ranks all(7, [&](int self) {
    if (self == 6) {
      MessageQueue queue = MessageQueue::attach_writer({.external_writer = handle});
      for (int i = 0; i < 100; ++i) queue.put_config(Config(i));
      return;
    }
    const auto world = groups.join(self);
    GroupCoordinator group(two_rows, *world, "tp");
    MessageQueue from_last = group.create_mq_broadcaster({.writer = 2});
    for (int i = 0; i < 100; ++i)
      if (group.is_last_rank())
        from_last.put_config(Config(i));
      else
        RANK_CHECK(from_last.get_config() == Config(i));
    // The queue of the second group; only one of its ranks passes the handle.
    if (group.first_rank() == 3) {
      MessageQueue outside =
          group.create_mq_broadcaster({.writer = 1, .external_writer = group.rank_in_group() == 1 ? handle : ""});
      for (int i = 0; i < 100; ++i) RANK_CHECK(outside.get_config() == Config(i));
    }
    auto queues = group.create_single_reader_mq_broadcasters(1);
    for (int i = 0; i < 100; ++i) {
      queues.own->put_config(Config(10 * i + group.rank_in_group()));
      RANK_CHECK(queues.by_writer.size() == (group.rank_in_group() == 1 ? 3U : 0U));
      for (std::size_t from = 0; from < queues.by_writer.size(); ++from)
        RANK_CHECK(queues.by_writer[from]->get_config() == Config(10 * i + static_cast<int>(from)));
    }
    error_of(ErrorKind::invalid_argument, {"reader 3"}, [&] { (void)group.create_single_reader_mq_broadcasters(3); });
    error_of(ErrorKind::invalid_argument, {"3"}, [&] { (void)group.create_mq_broadcaster({.writer = 3}); });
    group.barrier();
  });
  check_ended(all.wait());
}

TEST_CASE("queues of ranks that share no memory are an error on all ranks") {
  const Setting files("MUSTER_TEST_GROUP", "file");
  run_ranks(2, [](Group& world) {
    const std::vector<std::vector<int>> both = {{0, 1}};
    GroupCoordinator group(both, world, "tp");
    error_of(ErrorKind::unsupported, {"share memory"}, [&] { (void)group.create_mq_broadcaster(); });
    error_of(ErrorKind::unsupported, {"share memory"}, [&] { (void)group.create_single_reader_mq_broadcasters(); });
    error_of(ErrorKind::unsupported, {"share memory"},
             [&] { GroupCoordinator(both, world, "tp", {.use_message_queue_broadcaster = true}); });
    const TensorSpec spec{DType::f32, {1000}};
    group.prepare_communication_buffer_for_model(std::span(&spec, 1));
    group.barrier();
  });
}

TEST_CASE("shared results use the buffers that are prepared for a model's tensors") {
  run_ranks(3, [](Group& world) {
    GroupCoordinator group(std::vector<std::vector<int>>{{0, 1, 2}}, world, "tp");
    const std::vector<TensorSpec> specs = {{DType::bf16, {16, 128}}, {DType::f32, {512, 1024}}, {DType::u8, {}}};
    group.prepare_communication_buffer_for_model(specs);
    const std::uint64_t room = group::Region::own()->room();
    for (const TensorSpec& spec : {specs[0], specs[1], specs[1], specs[2], specs[1]}) {
      (void)group.process_group().all_reduce_shared(pattern(spec.dtype, spec.shape, 1), ReduceOp::max);
      if (!spec.shape.empty()) (void)group.process_group().all_gather_shared(pattern(spec.dtype, spec.shape, 1));
    }
    RANK_CHECK(group::Region::own()->room() == room);
    const TensorSpec bad{DType::f32, {-1}};
    error_of(ErrorKind::invalid_argument, {},
             [&] { group.prepare_communication_buffer_for_model(std::span(&bad, world.rank() == 1 ? 1 : 0)); });
    group.barrier();
  });
}
