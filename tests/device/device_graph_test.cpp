// SPDX-License-Identifier: Apache-2.0
// Collectives as parts of CUDA graphs, and with several devices per process, over a fake driver and a fake NCCL.

#include "muster/compat/dist_multigpu.hpp"
#include "muster/cuda.hpp"
#include "tests/device/device_ranks.hpp"

using namespace muster;
using namespace muster::test;

namespace {

std::vector<float> sevens(int count, float times) {
  return std::vector<float>(static_cast<std::size_t>(count), 7 * times);
}
Tensor row(float times, int device, int count = 50000) {
  return on_device(Tensor::take(sevens(count, times)), device);
}
bool is_row(const Tensor& tensor, float times, int count = 50000) {
  return bitwise_equal(copy_to_host(tensor), Tensor::take(sevens(count, times)));
}
void fill(const Tensor& tensor, float times, const UserStream& stream) {
  const Tensor from = page_locked(Tensor::take(sevens(static_cast<int>(tensor.shape()[0]), times)));
  stream.write(tensor, from);
  const CudaStreamScope scope(stream.handle());
  (void)copy_to_host(tensor);
}

}  // namespace

TEST_CASE("collectives are captured, and run as often as the graph is launched") {
  const Setting devices("FAKE_CUDA_DEVICES", "4");
  for (const int ranks : {1, 2, 4})
    run_ranks(ranks, [](Group& outer) {
      ProcessGroup group(outer);
      const int self = group.rank();
      const int n = group.size();
      const UserStream stream(self);
      const Tensor mine = row(1, self);
      const Tensor all = row(0, self, 50000 * n);
      group.all_reduce(mine);  // creates the NCCL communicator
      CudaGraph graph;
      {
        CudaGraphCapture capture(self);
        const Counted taken = calls("cuMemAlloc_v2");
        group.all_reduce(mine);
        group.all_gather_into(all, mine);
        group.barrier();  // runs on the CPU: not a part of the graph
        RANK_CHECK(calls("cuMemAlloc_v2") == taken);
        graph = capture.end();
      }
      RANK_CHECK(is_row(mine, static_cast<float>(n)));
      RANK_CHECK(is_row(all, 0, 50000 * n));
      for (const float times : {1.0F, 2.0F, 3.0F}) {
        fill(mine, times, stream);
        graph.launch(stream.handle());
        graph.launch(stream.handle());
        const CudaStreamScope scope(stream.handle());
        RANK_CHECK(is_row(mine, times * static_cast<float>(n * n)));
        RANK_CHECK(is_row(all, times * static_cast<float>(n * n), 50000 * n));
        group.all_reduce(mine);
        RANK_CHECK(is_row(mine, times * static_cast<float>(n * n * n)));
      }
      CudaGraph moved = std::move(graph);
      error_of(ErrorKind::invalid_argument, {"graph: it is empty"}, [&] { graph.launch(stream.handle()); });
      moved = CudaGraph();
      RANK_CHECK(still_open("graphs") == 0);
    });
}

TEST_CASE("calls that cannot be captured are refused on all ranks, and the capture is unharmed") {
  run_ranks(2, [](Group& outer) {
    ProcessGroup group(outer);
    const int self = group.rank();
    const Tensor mine = row(1, self);
    const Tensor wide = on_device(pattern(DType::f32, {4, 4}, 1), self);
    const UserStream stream(self);
    {
      CudaGraphCapture capture(self);
      error_of(ErrorKind::invalid_argument, {"before the capture begins"}, [&] { group.all_reduce(mine); });
      const CudaGraph empty = capture.end();
      empty.launch(stream.handle());
    }
    group.all_reduce(mine);
    CudaGraphCapture capture(self);
    error_of(ErrorKind::invalid_argument, {"Pass the result"}, [&] { (void)group.all_gather(mine); });
    error_of(ErrorKind::invalid_argument, {"Pass the result"}, [&] { (void)group.reduce_scatter(mine); });
    error_of(ErrorKind::invalid_argument, {"Pass the result"}, [&] { (void)group.gather(mine, 1); });
    error_of(ErrorKind::invalid_argument, {"Pass the result"}, [&] { (void)group.all_to_all(mine); });
    error_of(ErrorKind::invalid_argument, {"Pass the result"}, [&] { (void)group.reduce_scatter(wide, 1); });
    // Captured on one rank only.
    if (self == 0) {
      error_of(ErrorKind::rank_mismatch, {"captured into a graph"}, [&] { group.all_reduce(mine); });
    } else {
      const CudaStreamScope scope(stream.handle());
      error_of(ErrorKind::rank_mismatch, {"captured into a graph"}, [&] { group.all_reduce(mine); });
    }
    group.broadcast(mine, 1);
    const CudaGraph graph = capture.end();
    error_of(ErrorKind::invalid_argument, {"already ended"}, [&] { (void)capture.end(); });
    fill(mine, static_cast<float>(3 + self), stream);
    graph.launch(stream.handle());
    const CudaStreamScope scope(stream.handle());
    RANK_CHECK(is_row(mine, 4));
  });
}

TEST_CASE("several devices in each process") {
  const Setting devices("FAKE_CUDA_DEVICES", "6");
  for (const int ranks : {1, 3})
    run_ranks(ranks, [](Group& outer) {
      set_world(outer.shared_from_this());
      dist::init_process_group("nccl");
      const int self = dist::get_rank();
      const int n = dist::get_world_size();
      const int first = 2 * self;
      // One communicator more for each device of the job.
      const auto own = [&] {
        return std::vector{row(static_cast<float>(first + 1), first), row(static_cast<float>(first + 2), first + 1)};
      };
      const auto all_are = [](const std::vector<Tensor>& tensors, float times) {
        for (const Tensor& tensor : tensors) RANK_CHECK(is_row(tensor, times));
      };
      const auto sum = static_cast<float>(n * (2 * n + 1));
      std::vector<Tensor> tensors = own();
      dist::all_reduce_multigpu(tensors);
      all_are(tensors, sum);
      for (int root = 0; root < n; ++root) {
        tensors = own();
        dist::broadcast_multigpu(tensors, root);
        all_are(tensors, static_cast<float>(2 * root + 1));
        tensors = own();
        dist::reduce_multigpu(tensors, root, ReduceOp::max);
        RANK_CHECK(is_row(tensors[0], root == self ? static_cast<float>(2 * n) : static_cast<float>(first + 1)));
        RANK_CHECK(is_row(tensors[1], static_cast<float>(first + 2)));
      }
      tensors = own();
      std::vector<std::vector<Tensor>> outputs(2);
      for (int lane = 0; lane < 2; ++lane)
        for (int i = 0; i < 2 * n; ++i) outputs[static_cast<std::size_t>(lane)].push_back(row(0, first + lane));
      dist::all_gather_multigpu(outputs, tensors);
      for (int lane = 0; lane < 2; ++lane)
        for (int i = 0; i < 2 * n; ++i)
          RANK_CHECK(
              is_row(outputs[static_cast<std::size_t>(lane)][static_cast<std::size_t>(i)], static_cast<float>(i + 1)));
      // Invalid calls, on all ranks.
      error_of(ErrorKind::invalid_argument, {"rank 5 is not in this group"},
               [&] { dist::broadcast_multigpu(tensors, 5); });
      error_of(ErrorKind::invalid_argument, {"Pass one per tensor"}, [&] { dist::all_gather_multigpu({}, tensors); });
      error_of(ErrorKind::invalid_argument, {"must not be empty"}, [&] { dist::all_reduce_multigpu({}); });
      const std::vector<Tensor> twice{tensors[0], tensors[0]};
      error_of(ErrorKind::invalid_argument, {"two tensors are on cuda:"},
               [&] { dist::all_reduce_multigpu(self == 0 ? twice : tensors); });
      if (n > 1)
        error_of(ErrorKind::rank_mismatch, {"on 2 devices of each rank", "on a device"},
                 [&] { dist::all_reduce_multigpu(self == 1 ? std::span(tensors).first(1) : std::span(tensors)); });
      // dist also has the calls with one tensor per rank.
      tensors = own();
      dist::all_reduce(tensors[0]);
      RANK_CHECK(is_row(tensors[0], static_cast<float>(n * n)));
      dist::barrier();
      dist::destroy_process_group();
      set_world(nullptr);
    });
}
