// SPDX-License-Identifier: Apache-2.0
// Collectives of tensors on devices, between real processes, over a fake driver and a fake NCCL (fake/). Each call is
// compared with the same call in host memory; the order in streams is checked.

#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <optional>

#include "muster/process_group.hpp"
#include "src/collectives/engine.hpp"
#include "tests/device/device_ranks.hpp"

using namespace muster;
using namespace muster::test;

namespace {

const DType nccl_dtypes[] = {DType::i8,  DType::u8,  DType::i32,  DType::u32, DType::i64,
                             DType::u64, DType::f16, DType::bf16, DType::f32, DType::f64};
const ReduceOp ops[] = {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max, ReduceOp::average};

/// Numbers 0, 1 and 2. Every dtype represents them, and their sums and products over four ranks.
Tensor numbers(DType dtype, const Shape& shape, int rank) {
  const Tensor tensor = Tensor::allocate(dtype, shape);
  const std::size_t bytes = itemsize(dtype);
  for (std::size_t i = 0; i < tensor.nbytes() / bytes; ++i) {
    const std::size_t number = (i * 7 + static_cast<std::size_t>(rank) * 5 + i / 3) % 3;
    const auto put = [&](auto value) { std::memcpy(tensor.mutable_data() + i * bytes, &value, bytes); };
    if (dtype == DType::f64)
      put(static_cast<double>(number));
    else if (dtype == DType::f32)
      put(static_cast<float>(number));
    else if (dtype == DType::f16)
      put(std::array<std::uint16_t, 3>{0, 0x3c00, 0x4000}[number]);
    else if (dtype == DType::bf16)
      put(std::array<std::uint16_t, 3>{0, 0x3f80, 0x4000}[number]);
    else
      put(std::uint64_t{number});
  }
  return tensor;
}

/// Places a tensor where the call needs it.
using At = std::function<Tensor(const Tensor&)>;
/// Makes a call with tensors from `At`, and returns its results and written tensors.
using Call = std::function<std::vector<Tensor>(ProcessGroup&, const At&)>;

/// Other ranks may need pending work of this rank's device, and a fake device makes progress only when it is queried.
void wait_for_stream(int device) {
  (void)copy_to_host(device_pattern(DType::u8, {1}, 1, device));
}

/// Compares the call in host memory with the same call on this rank's device.
void check_alike(ProcessGroup& group, const Call& call) {
  const std::vector<Tensor> expected = call(group, [](const Tensor& tensor) { return Tensor::copy_of(tensor); });
  std::vector<Tensor> given;  // inputs live until the device has read them
  const std::vector<Tensor> got =
      call(group, [&](const Tensor& tensor) { return given.emplace_back(on_device(tensor, group.rank())); });
  wait_for_stream(group.rank());
  RANK_CHECK(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    RANK_CHECK(to_string(got[i].device()) == "cuda:" + std::to_string(group.rank()));
    RANK_CHECK(bitwise_equal(copy_to_host(got[i]), expected[i]));
  }
}

void with_devices(int ranks, const std::function<void(ProcessGroup&)>& body) {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  run_ranks(ranks, [&](Group& outer) {
    ProcessGroup group(outer);
    body(group);
  });
}

std::vector<Tensor> present(std::optional<Tensor> tensor) {
  return tensor ? std::vector{*tensor} : std::vector<Tensor>{};
}

}  // namespace

TEST_CASE("reductions of every dtype and operation that NCCL has") {
  for (const int ranks : {1, 2, 4})
    with_devices(ranks, [](ProcessGroup& group) {
      for (const DType dtype : nccl_dtypes)
        for (const ReduceOp op : ops) {
          if (op == ReduceOp::average && dtype < DType::f16) continue;
          check_alike(group, [&](ProcessGroup& all, const At& at) {
            const Tensor mine = at(numbers(dtype, {5, 3}, all.rank()));
            all.all_reduce(mine, op);
            return std::vector{mine};
          });
        }
    });
}

TEST_CASE("each call gives what it gives in host memory") {
  for (const int ranks : {1, 2, 4})
    with_devices(ranks, [](ProcessGroup& group) {
      const int n = group.size();
      const auto mine = [&](const At& at, const Shape& shape) { return at(numbers(DType::f32, shape, group.rank())); };
      const auto blank = [&](const At& at, const Shape& shape) { return at(numbers(DType::f32, shape, 9)); };
      const auto uneven = [](int rank) { return std::int64_t{(rank + 2) % 3}; };
      std::int64_t rows = 0;
      std::vector<std::int64_t> extents;
      for (int rank = 0; rank < n; ++rank) rows += extents.emplace_back(uneven(rank));
      const auto check = [&](const Call& call) { check_alike(group, call); };

      for (const Shape& shape : {Shape{4, 8, 4}, Shape{0, 4}, Shape{70000}, Shape{}}) {
        check([&](ProcessGroup& all, const At& at) {
          const Tensor out = blank(at, shape);
          all.all_reduce_into(out, mine(at, shape), ReduceOp::max);
          return std::vector{out};
        });
        check([&](ProcessGroup& all, const At& at) {
          const Tensor tensor = mine(at, shape);
          return std::vector{*collectives::engine_of(all).all_reduce(
              {"all_reduce", ReduceOp::sum, {}, DType::f32, &tensor.shape()}, nullptr, tensor, {})};
        });
        for (int root = 0; root < n; ++root) {
          check([&](ProcessGroup& all, const At& at) {
            const Tensor tensor = mine(at, shape);
            all.reduce(tensor, root);
            return std::vector{tensor};
          });
          check([&](ProcessGroup& all, const At& at) {
            const Tensor tensor = mine(at, shape);
            all.broadcast(tensor, root);
            return std::vector{tensor};
          });
        }
      }
      for (const int dim : {0, 1, 2, -1, -2}) {
        check([&](ProcessGroup& all, const At& at) { return std::vector{all.all_gather(mine(at, {4, 8, 4}), dim)}; });
        check([&](ProcessGroup& all, const At& at) {
          return std::vector{all.reduce_scatter(mine(at, {4, 8, 4}), dim)};
        });
        check([&](ProcessGroup& all, const At& at) { return present(all.gather(mine(at, {4, 8, 4}), n - 1, dim)); });
      }
      check([&](ProcessGroup& all, const At& at) {
        const Tensor out = blank(at, {8 / n, 3});
        all.reduce_scatter_into(out, mine(at, {8, 3}), ReduceOp::min);
        return std::vector{out};
      });
      for (const int dim : {0, 1}) {
        const auto shaped = [&](std::int64_t extent) { return dim == 0 ? Shape{extent, 3} : Shape{3, extent}; };
        check([&](ProcessGroup& all, const At& at) {
          return std::vector{all.reduce_scatterv(mine(at, shaped(rows)), extents, dim)};
        });
        check([&](ProcessGroup& all, const At& at) {
          return std::vector{all.all_gatherv(mine(at, shaped(uneven(all.rank()))), dim, extents)};
        });
        check([&](ProcessGroup& all, const At& at) {
          return present(all.gatherv(mine(at, shaped(uneven(all.rank()))), 0, dim));
        });
      }
      check([&](ProcessGroup& all, const At& at) {
        const Tensor out = blank(at, {2 * n, 3});
        all.all_gather_into(out, mine(at, {2, 3}));
        return std::vector{out};
      });
      check([&](ProcessGroup& all, const At& at) {
        std::vector<Tensor> outs;
        for (int rank = 0; rank < n; ++rank) outs.push_back(blank(at, {uneven(rank), 3}));
        all.all_gather_into(outs, mine(at, {uneven(all.rank()), 3}));
        return outs;
      });
      check([&](ProcessGroup& all, const At& at) {
        std::vector<Tensor> outs;
        for (int rank = 0; rank < (all.rank() == 0 ? n : 0); ++rank) outs.push_back(blank(at, {5}));
        all.gather_into(outs, mine(at, {5}), 0);
        return outs;
      });
      check([&](ProcessGroup& all, const At& at) {
        const Tensor out = blank(at, {5});
        std::vector<Tensor> parts;
        for (int rank = 0; rank < (all.rank() == n - 1 ? n : 0); ++rank)
          parts.push_back(at(numbers(DType::f32, {5}, 20 + rank)));
        const std::vector<TensorView> views(parts.begin(), parts.end());
        all.scatter(out, views, n - 1);
        return std::vector{out};
      });
      check([&](ProcessGroup& all, const At& at) { return std::vector{all.all_to_all(mine(at, {8, 3}))}; });
      check([&](ProcessGroup& all, const At& at) {
        const Tensor out = blank(at, {8, 3});
        all.all_to_all_into(out, mine(at, {8, 3}));
        return std::vector{out};
      });
      check([&](ProcessGroup& all, const At& at) {
        return std::vector{all.all_to_allv(mine(at, {rows, 3}), extents)};
      });
      // Calls that only move data accept any dtype.
      for (const DType dtype : {DType::boolean, DType::i16, DType::f8_e4m3fn, DType::u4, DType::complex64})
        check([&](ProcessGroup& all, const At& at) {
          return std::vector{all.all_gather(at(pattern(dtype, {3, 4}, static_cast<std::uint64_t>(all.rank()))), 1)};
        });
      group.barrier();
    });
}

TEST_CASE("a call runs after the queued work of its stream, and does not wait for it") {
  with_devices(2, [](ProcessGroup& group) {
    const std::vector<std::uint64_t> seeds = many_seeds(static_cast<std::uint64_t>(group.rank()), 2);
    const std::vector<Tensor> work = work_of(seeds);
    const UserStream stream(group.rank());
    const UserStream another(group.rank());
    const Tensor mine = device_pattern(DType::u8, {100000}, 99, group.rank());
    Tensor all;
    {
      const CudaStreamScope scope(stream.handle());
      all = group.all_gather(mine);  // the NCCL communicator exists now
      (void)copy_to_host(all);
      stream.write_all(mine, work);
      all = group.all_gather(mine);
    }
    // Calls run in order, whichever stream is named: this one reads the result of the other.
    Tensor again;
    {
      const CudaStreamScope scope(another.handle());
      again = group.all_to_all(all);
      const Tensor host = copy_to_host(again);
      for (int rank = 0; rank < 2; ++rank)
        RANK_CHECK(
            is_pattern(host.view().slice(0, rank * 100000, (rank + 1) * 100000), DType::u8, {100000}, seeds.back()));
    }
  });
}

TEST_CASE("results whose memory is reused, in streams that do not wait for each other") {
  with_devices(2, [](ProcessGroup& group) {
    const UserStream streams[] = {UserStream(group.rank()), UserStream(group.rank())};
    const Tensor mine = device_pattern(DType::u8, {50000}, static_cast<std::uint64_t>(group.rank()), group.rank());
    for (int i = 0; i < 20; ++i) {
      const CudaStreamScope scope(streams[i % 2].handle());
      Tensor kept = group.all_gather(mine);
      for (int k = 0; k < 3; ++k) (void)group.all_gather(mine);
      const Tensor host = copy_to_host(kept);
      for (int rank = 0; rank < 2; ++rank)
        RANK_CHECK(is_pattern(host.view().slice(0, rank * 50000, (rank + 1) * 50000), DType::u8, {50000},
                              static_cast<std::uint64_t>(rank)));
    }
  });
}

TEST_CASE("one communicator for a set of devices, and its destruction") {
  with_devices(2, [](ProcessGroup& group) {
    const auto inits = [] { return fake<std::uint64_t()>("libnccl.so.2", "fake_nccl_inits")(); };
    const auto ended = [] { return fake<std::uint64_t()>("libnccl.so.2", "fake_nccl_ended")(); };
    const int n = group.size();
    for (int turn = 0; turn < 2; ++turn)
      for (const int device : {group.rank(), n + group.rank()}) {
        const Tensor mine = device_pattern(DType::u8, {100}, 1, device);
        for (int i = 0; i < 3; ++i) group.broadcast(mine, i % n);
      }
    RANK_CHECK(inits() == 2);
    {
      ProcessGroup another(group.group());
      another.broadcast(device_pattern(DType::u8, {100}, 1, group.rank()), 0);
    }
    RANK_CHECK(inits() == 3);
    RANK_CHECK(ended() == 1);
  });
}

TEST_CASE("a process forked from one that has an NCCL communicator ends normally") {
  with_devices(2, [](ProcessGroup& group) {
    const Tensor mine = device_pattern(DType::u8, {100}, 1, group.rank());
    std::optional<ProcessGroup> another(std::in_place, group.group());
    another->broadcast(mine, 0);
    another->wait_for_devices();
    const pid_t child = ::fork();
    if (child == 0) {
      another.reset();
      ::_exit(0);
    }
    int status = -1;
    RANK_CHECK(::waitpid(child, &status, 0) == child);
    RANK_CHECK(status == 0);
    another->broadcast(mine, 1);
    another->wait_for_devices();
  });
}

TEST_CASE("the destructor of a group waits for pending work of its devices") {
  with_devices(2, [](ProcessGroup& outer) {
    const auto seed = static_cast<std::uint64_t>(outer.rank());
    const Tensor mine = device_pattern(DType::u8, {300000}, seed, outer.rank());
    Tensor all;
    {
      ProcessGroup group(outer.group());
      all = group.all_gather(mine);
    }
    const Tensor host = copy_to_host(all);
    for (int rank = 0; rank < 2; ++rank)
      RANK_CHECK(is_pattern(host.view().slice(0, rank * 300000, (rank + 1) * 300000), DType::u8, {300000},
                            static_cast<std::uint64_t>(rank)));
  });
}
