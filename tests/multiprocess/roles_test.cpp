// SPDX-License-Identifier: Apache-2.0
// Training ranks, buffer managers and a coordinator: their groups, byte messages, data and averages of the training
// ranks, independent of the calls of other ranks.

#include "muster/compat/roles.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "doctest/doctest.h"
#include "muster/log.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::roles;
using namespace muster::test;

namespace {

/// 4 of 7 ranks train.
constexpr RoleSizes sizes{.num_remote_buffers = 2, .num_agent_groups = 2, .use_coordinator = true};

Tensor numbers(std::vector<float> values) {
  return Tensor::take(std::move(values));
}

bool is(const TensorView& tensor, const std::vector<float>& values) {
  return std::ranges::equal(tensor.values<float>(), values);
}

float sum_of(const std::vector<int>& ranks) {
  float sum = 0;
  for (const int rank : ranks) sum += static_cast<float>(rank);
  return sum;
}

void check_group(DistributedContext& context, ProcessGroup& group, const std::vector<int>& ranks) {
  RANK_CHECK(group.size() == static_cast<int>(ranks.size()));
  RANK_CHECK(context.get_world_size(&group) == group.size());
  RANK_CHECK(ranks[static_cast<std::size_t>(context.get_rank(&group))] == context.my_rank());
  const auto mine = static_cast<float>(context.my_rank());
  const Tensor tensor = numbers({mine});
  context.all_reduce(tensor, ReduceOp::sum, &group);
  RANK_CHECK(is(tensor, {sum_of(ranks)}));
  const Tensor least = numbers({mine});
  context.all_reduce(least, ReduceOp::min, &group);
  RANK_CHECK(is(least, {static_cast<float>(*std::ranges::min_element(ranks))}));
  const Tensor last = numbers({mine});
  context.broadcast(last, group.size() - 1, &group);
  RANK_CHECK(is(last, {static_cast<float>(ranks.back())}));
  std::vector<Tensor> all;
  for (std::size_t i = 0; i < ranks.size(); ++i) all.push_back(numbers({-1}));
  context.all_gather(all, numbers({mine}), &group);
  for (std::size_t i = 0; i < ranks.size(); ++i) RANK_CHECK(is(all[i], {static_cast<float>(ranks[i])}));
  context.barrier(&group);
}

void check_context(DistributedContext& context) {
  const RankLayout& layout = context.layout();
  const int self = context.my_rank();
  check_group(context, context.world(), {0, 1, 2, 3, 4, 5, 6});
  RANK_CHECK(context.get_rank() == self);
  RANK_CHECK(context.get_world_size() == 7);
  RANK_CHECK(context.num_training_ranks() == 4);
  RANK_CHECK(context.agent_group_size() == 2);
  RANK_CHECK(context.coordinator_rank() == 6);
  RANK_CHECK(context.is_coordinator_rank() == (self == 6));
  if (context.is_training_rank()) {
    check_group(context, context.train_group(), layout.training_ranks);
    check_group(context, context.agent_group(),
                layout.agent_groups[static_cast<std::size_t>(context.agent_group_id())]);
    const std::vector<int> served = layout.assigned_training_ranks(*context.assigned_buffer());
    RANK_CHECK(std::ranges::find(served, self) != served.end());
    error_of(ErrorKind::invalid_argument, {"is a training rank, and has no group as a buffer manager"},
             [&] { (void)context.buffer_group(); });
  } else {
    RANK_CHECK(!context.assigned_buffer());
    error_of(ErrorKind::invalid_argument, {"has no group as a training rank"}, [&] { (void)context.train_group(); });
    error_of(ErrorKind::invalid_argument, {"has no group as a training rank"}, [&] { (void)context.agent_group(); });
  }
  if (context.is_buffer_rank()) {
    check_group(context, context.buffer_group(), layout.buffer_ranks);
    RANK_CHECK(!context.assigned_training_ranks().empty());
  }
  context.barrier();
}

/// Runs `body` with the context of each of 7 ranks.
void run_roles(const std::function<void(DistributedContext&)>& body) {
  run_ranks(7, [&](Group& group) {
    DistributedContext context = initialize_distributed_compute(group, sizes);
    body(context);
    context.barrier();
  });
}

Parameter parameter(const char* name, Tensor value, std::optional<Tensor> gradient = {}) {
  return {name, std::move(value), std::move(gradient)};
}

}  // namespace

TEST_CASE("each rank has its groups, and can destroy and create them any number of times") {
  run_ranks(7, [](Group& group) {
    for (int round = 0; round < 2; ++round) {
      DistributedContext context = initialize_distributed_compute(group, sizes);
      check_context(context);
      context.cleanup();
      context.cleanup();
      RANK_CHECK(context.world_size() == 7);
      error_of(ErrorKind::invalid_argument, {"destroyed by cleanup()"}, [&] { context.barrier(); });
      error_of(ErrorKind::invalid_argument, {"destroyed by cleanup()"}, [&] { (void)context.train_group(); });
      group.barrier();
    }
  });
}

TEST_CASE("one agent group is the train group; a buffer that has no host of its own causes one warning") {
  run_ranks(4, [](Group& group) {
    static int warnings = 0;
    set_log_hook([](LogLevel level, std::string_view words) {
      if (level == LogLevel::warning && words.find("number of hosts does not divide") != std::string_view::npos)
        ++warnings;
    });
    DistributedContext context = initialize_distributed_compute(group, {.num_remote_buffers = 1});
    RANK_CHECK(warnings == (context.layout().host_agnostic && group.rank() == 0 ? 1 : 0));
    if (context.is_training_rank()) RANK_CHECK(&context.agent_group() == &context.train_group());
    RANK_CHECK(context.is_buffer_rank() == (group.rank() == 3));
    RANK_CHECK(!context.coordinator_rank());
    context.barrier();
  });
}

TEST_CASE("invalid or different sizes are an error on all ranks, and the group remains usable") {
  run_ranks(7, [](Group& group) {
    const auto with = [&](RoleSizes these) { (void)initialize_distributed_compute(group, these); };
    error_of(ErrorKind::invalid_argument, {"no training rank"}, [&] { with({7, 1, false}); });
    error_of(ErrorKind::invalid_argument, {"not a multiple of 4 agent groups"}, [&] { with({1, 4, true}); });
    error_of(ErrorKind::invalid_argument, {"-1 remote buffers"}, [&] { with({-1, 1, false}); });
    for (const RoleSizes& other : {RoleSizes{1, 2, true}, RoleSizes{2, 0, true}, RoleSizes{2, 2, false}}) {
      const Error error = error_of(ErrorKind::rank_mismatch,
                                   {"rank 3", "rank 0", "2 remote buffers, 2 agent groups and 1 coordinators"},
                                   [&] { with(group.rank() == 3 ? other : sizes); });
      RANK_CHECK(error.rank() == 3);
    }
    DistributedContext context = initialize_distributed_compute(group, sizes);
    check_context(context);
  });
}

TEST_CASE("bytes by tag, of any dtype, from one rank or any rank") {
  run_roles([](DistributedContext& context) {
    const Tensor narrow = pattern(DType::bf16, {2, 3}, 1);
    const Tensor wide = pattern(DType::f64, {4, 5}, 2);
    const Tensor large = pattern(DType::f32, {300, 1000}, 3);
    const Tensor transposed = Tensor::copy_of(wide.view().transposed());
    const auto has = [&](const ReceivedBytes& message, int source, const Tensor& tensor) {
      RANK_CHECK(message.source == source);
      RANK_CHECK((message.data.dtype() == DType::u8 &&
                  message.data.shape() == Shape{static_cast<std::int64_t>(tensor.nbytes())}));
      RANK_CHECK(std::ranges::equal(message.data.bytes(), tensor.bytes()));
      RANK_CHECK(message.data.nbytes() == 0 || message.data.is_writable());
    };
    const int self = context.my_rank();
    if (self == 0) {
      context.send(narrow, 6, 5);
      context.send(wide.view().transposed(), 6, 4);
      AsyncSendHandle handle = context.isend(large, 6, 3);
      context.send(Tensor::allocate(DType::i64, {0, 3}), 6, 2);
      context.send(Tensor::take(std::vector<std::int32_t>{-1}, {}), 6, 2);
      context.world().send_config(Config::array({1}), 6, 1);
      handle.wait();
      handle.wait();
      RANK_CHECK(handle.is_complete());
      error_of(ErrorKind::invalid_argument, {"tag -3"}, [&] { context.send(narrow, 6, -3); });
      error_of(ErrorKind::invalid_argument, {"itself"}, [&] { context.send(narrow, 0); });
      error_of(ErrorKind::invalid_argument, {}, [&] { (void)context.isend(narrow, 7); });
    }
    if (self == 6) {
      // Tags are received in a different order than they were sent. Messages with the same tag keep their order.
      has(context.recv(0, 2), 0, Tensor::allocate(DType::u8, {0}));
      has(context.recv({}, 3), 0, large);
      has(context.recv({}, 4), 0, transposed);
      has(context.recv(0, 2), 0, Tensor::take(std::vector<std::int32_t>{-1}, {}));
      const ReceivedBytes last = context.recv(0, any_tag);
      RANK_CHECK(last.tag == 5);
      has(last, 0, narrow);
      error_of(ErrorKind::rank_mismatch, {"message of rank 0 with tag 1"}, [&] { (void)context.recv({}, 1); });
    }
    context.barrier();
    // Receives from all other ranks, in order of arrival.
    if (self == 3) {
      std::vector<int> sources;
      for (int i = 0; i < 6; ++i) {
        const ReceivedBytes message = context.recv();
        has(message, message.source, pattern(DType::f16, {50, message.source}, 7));
        sources.push_back(message.source);
      }
      std::ranges::sort(sources);
      RANK_CHECK((sources == std::vector<int>{0, 1, 2, 4, 5, 6}));
    } else {
      context.send(pattern(DType::f16, {50, self}, 7), 3);
    }
  });
}

TEST_CASE("two ranks that both start with isend to each other complete") {
  run_roles([](DistributedContext& context) {
    const int self = context.my_rank();
    if (self > 1) return;
    for (const std::int64_t bytes : {10, 1 << 20}) {
      std::vector<AsyncSendHandle> handles;
      for (std::uint64_t i = 0; i < 3; ++i) {
        // No other rank has the tensor.
        handles.push_back(context.isend(pattern(DType::u8, {bytes}, seed_of(self, i)), 1 - self, 9));
      }
      for (std::uint64_t i = 0; i < 3; ++i)
        RANK_CHECK(is_pattern(context.recv(1 - self, 9).data, DType::u8, {bytes}, seed_of(1 - self, i)));
      for (AsyncSendHandle& handle : handles) handle.wait();
      RANK_CHECK(handles[0].is_complete());
    }
  });
}

TEST_CASE("a rank that waits for bytes from any rank receives the error of a killed rank") {
  run_ranks(4,
            [](Group& group) {
              DistributedContext context = initialize_distributed_compute(group, {.num_remote_buffers = 1});
              if (context.is_training_rank()) context.send(numbers({1}), *context.assigned_buffer());
              for (int i = 0; context.is_buffer_rank() && i < 3; ++i) (void)context.recv();
              context.barrier();
              if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
              if (context.is_training_rank())
                error_of(ErrorKind::peer_lost, {"rank 1"}, [&] { context.barrier(&context.train_group()); });
              // No rank leaves before all have received the error.
              error_of(ErrorKind::peer_lost, {"rank 1"},
                       [&] { context.is_buffer_rank() ? (void)context.recv() : context.barrier(); });
            },
            {1});
}

TEST_CASE("data of the training ranks: any dtype, more rows than the dtype can count, no rows, three dimensions") {
  struct Data {
    DType dtype;
    Shape row;
    std::vector<std::int64_t> rows;  // rows of each training rank
  };
  const Data all[] = {
      {DType::u8, {3}, {300, 0, 1, 700}}, {DType::bf16, {2}, {257, 513, 1, 259}}, {DType::f32, {2, 3}, {4, 1, 0, 2}},
      {DType::boolean, {}, {0, 5, 0, 0}}, {DType::f64, {4}, {0, 0, 0, 0}},        {DType::complex64, {0}, {3, 0, 1, 1}},
      {DType::u4, {2}, {1, 2, 0, 3}},
  };
  run_roles([&](DistributedContext& context) {
    if (!context.is_training_rank()) return;
    ProcessGroup& group = context.train_group();
    const auto self = static_cast<std::size_t>(group.rank());
    const auto part = [](const Data& data, std::size_t rank) {
      Shape shape = data.row;
      shape.insert(shape.begin(), data.rows[rank]);
      return pattern(data.dtype, shape, rank);
    };
    for (const Data& data : all) {
      const std::optional<Tensor> whole = gather_distributed_data(part(data, self), group);
      RANK_CHECK(whole.has_value() == (self == 0));
      if (!whole) continue;
      std::vector<std::byte> bytes;
      for (std::size_t rank = 0; rank < 4; ++rank) {
        const Tensor one = part(data, rank);
        bytes.insert(bytes.end(), one.bytes().begin(), one.bytes().end());
      }
      Shape shape = data.row;
      shape.insert(shape.begin(), data.rows[0] + data.rows[1] + data.rows[2] + data.rows[3]);
      RANK_CHECK((whole->dtype() == data.dtype && whole->shape() == shape));
      RANK_CHECK(std::ranges::equal(whole->bytes(), bytes));
    }
    error_of(ErrorKind::invalid_argument, {"dimension 0 is out of range"}, [&] {
      (void)gather_distributed_data(self == 2 ? Tensor::allocate(DType::f32, {}) : numbers({1}), group);
    });
    error_of(ErrorKind::rank_mismatch, {}, [&] {
      (void)gather_distributed_data(Tensor::allocate(DType::f32, {1, self == 2 ? 3 : 2}), group);
    });
  });
}

TEST_CASE("averages cover only the ranks of the group; the other ranks never call") {
  run_roles([](DistributedContext& context) {
    if (!context.is_training_rank()) return;
    ProcessGroup& group = context.train_group();
    const auto self = static_cast<float>(group.rank());
    const auto seed = static_cast<std::uint64_t>(group.rank());
    // Many small tensors of several dtypes, with large ones between them.
    std::vector<Parameter> model;
    for (int i = 0; i < 40; ++i) {
      const DType dtype = i % 3 == 0 ? DType::bf16 : i % 3 == 1 ? DType::f32 : DType::f64;
      const std::int64_t rows = i == 10 ? 700'000 : i % 5 == 0 ? 300'000 : i;
      const auto drawn = [&](std::uint64_t add) {
        const Tensor tensor = Tensor::allocate(DType::f32, {rows, 2});
        fill(tensor.mutable_data(), tensor.nbytes(), seed + add);
        return dtype == DType::f32 ? tensor : pattern(dtype, {rows, 2}, seed + add);
      };
      model.push_back(parameter(("layer." + std::to_string(i)).c_str(), drawn(i), drawn(1000 + i)));
      if (i % 7 == 3) model.back().gradient.reset();
    }
    const auto copies = [&](bool of_gradients) {
      std::vector<Tensor> all(model.size());
      for (std::size_t i = 0; i < all.size(); ++i)
        all[i] = Tensor::copy_of(of_gradients ? model[i].gradient.value_or(Tensor()) : model[i].value);
      return all;
    };
    const auto equal = [&](const std::vector<Tensor>& tensors, bool of_gradients) {
      const std::vector<Tensor> own = copies(of_gradients);
      for (std::size_t i = 0; i < own.size(); ++i) RANK_CHECK(bitwise_equal(own[i], tensors[i]));
    };
    // The result equals one call per tensor. The other tensors do not change.
    const auto check = [&](ProcessGroup& ranks, bool of_gradients) {
      const std::vector<Tensor> wanted = copies(of_gradients);
      const std::vector<Tensor> others = copies(!of_gradients);
      for (const Tensor& tensor : wanted)
        if (tensor.nbytes() != 0) ranks.all_reduce(tensor, ReduceOp::average);
      of_gradients ? average_gradients(model, ranks) : average_models(model, ranks);
      equal(wanted, of_gradients);
      equal(others, !of_gradients);
    };
    check(context.agent_group(), true);
    check(group, true);
    check(group, false);
    // The average is over these four ranks, not over all seven.
    const std::vector<Parameter> small = {parameter("a", numbers({self, 2 * self}), numbers({self + 1}))};
    average_models(small, group);
    average_gradients(small, group);
    RANK_CHECK(is(small[0].value, {1.5F, 3}));
    RANK_CHECK(is(*small[0].gradient, {2.5F}));
    average_gradients({}, group);
  });
}

TEST_CASE("models that differ, or cannot be averaged, are an error on all ranks that names the parameter") {
  run_roles([](DistributedContext& context) {
    if (!context.is_training_rank()) return;
    ProcessGroup& group = context.train_group();
    const bool is_other = group.rank() == 2;
    const auto self = static_cast<float>(group.rank());
    const std::vector<Parameter> model = {parameter("weight", numbers({self, 1}), numbers({self, 2})),
                                          parameter("bias", numbers({self}), numbers({self})),
                                          parameter("scale", numbers({self}))};
    const auto other = [&](std::size_t at, Parameter one) {
      std::vector<Parameter> changed = model;
      if (is_other) changed[at] = std::move(one);
      return changed;
    };
    std::vector<Parameter> shorter = model;
    if (is_other) shorter.pop_back();
    const auto name = [&](int rank) { return "rank " + std::to_string(group.global_rank(rank)); };
    const auto mismatch = [&](const std::vector<Parameter>& these, const std::string& first,
                              const std::string& second) {
      const Error error = error_of(ErrorKind::rank_mismatch, {name(0), first, name(2), second},
                                   [&] { average_gradients(these, group); });
      RANK_CHECK(error.rank() == group.global_rank(2));
    };
    mismatch(other(1, parameter("bias", numbers({1}))), "parameter \"bias\"", "\"bias\" with no gradient");
    mismatch(other(2, parameter("scale", numbers({1}), numbers({1}))), "parameter \"scale\"", "a gradient of F32 [1]");
    mismatch(other(0, parameter("weight", numbers({1}), numbers({1}))), "a gradient of F32 [2]",
             "a gradient of F32 [1]");
    mismatch(other(1, parameter("bios", numbers({1}), numbers({1}))), "\"bias\"", "\"bios\"");
    mismatch(shorter, "parameter \"scale\"", "has only 2 parameters");
    const Tensor integers = Tensor::take(std::vector<std::int64_t>{1});
    error_of(ErrorKind::unsupported, {name(2), "parameter \"bias\""},
             [&] { average_gradients(other(1, parameter("bias", integers, integers)), group); });
    const Tensor square = pattern(DType::f32, {3, 3}, 1);
    error_of(ErrorKind::invalid_argument, {name(2), "parameter \"bias\"", "contiguous"}, [&] {
      average_models(other(1, parameter("bias", Tensor(square.view().transposed(), square.owner()))), group);
    });
    error_of(ErrorKind::invalid_argument, {name(2), "parameter \"bias\""},
             [&] { average_models(other(1, parameter("bias", Tensor::borrow(square.view()))), group); });
    // No tensor was written, and the group remains usable.
    RANK_CHECK(is(*model[0].gradient, {self, 2}));
    RANK_CHECK(is(model[1].value, {self}));
    average_gradients(model, group);
    RANK_CHECK(is(*model[0].gradient, {1.5F, 2}));
  });
}

TEST_CASE("by the backends of torch.distributed, with and without a process group, and alone") {
  const TemporaryDirectory directory;
  const std::string file = "file://" + (directory.path() / "meeting").string();
  for (const char* backend : {"shm", "tcp", "gloo"}) {
    CAPTURE(backend);
    run_processes(7, [&](int rank) {
      const dist::InitOptions options{
          .init_method = file, .world_size = 7, .rank = rank, .group_name = backend, .timeout = {}};
      DistributedContext context = initialize_distributed_compute(backend, sizes, options);
      RANK_CHECK(!dist::is_initialized());
      check_context(context);
      context.cleanup();
    });
  }
  run_processes(1, [](int) {
    DistributedContext context = initialize_distributed_compute(default_backend, {});
    RANK_CHECK(context.is_training_rank());
    RANK_CHECK(context.world_size() == 1);
    RANK_CHECK(context.train_group().size() == 1);
    const std::vector<Parameter> model = {parameter("a", numbers({3}), numbers({4}))};
    average_gradients(model, context.train_group());
    RANK_CHECK(is(*model[0].gradient, {4}));
    RANK_CHECK(
        is_pattern(*gather_distributed_data(pattern(DType::u8, {5}, 1), context.train_group()), DType::u8, {5}, 1));
    context.cleanup();
    error_of(ErrorKind::invalid_argument, {"no training rank"},
             [] { (void)initialize_distributed_compute(default_backend, {.num_remote_buffers = 1}); });
    error_of(ErrorKind::invalid_argument, {"unknown backend \"ccl\""},
             [] { (void)initialize_distributed_compute("ccl", {}); });
  });
}
