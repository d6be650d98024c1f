// SPDX-License-Identifier: Apache-2.0
#include "muster/compat/dist_multigpu.hpp"

#include <fmt/core.h>

#include <optional>

#include "muster/error.hpp"
#include "src/collectives/engine.hpp"
#include "src/cuda/nccl_backend.hpp"
#include "src/merge/reduce.hpp"

namespace muster::dist {
namespace {

using collectives::DeviceBackend;
using collectives::What;
using cuda::Communicator;
using cuda::device_pointer;
using cuda::StreamHandle;

/// The device backend of a program is always the NcclBackend of libmuster-cuda.
cuda::NcclCalls& calls_of(DeviceBackend& backend) {
  return static_cast<cuda::NcclBackend&>(backend).calls();
}

/// `check` checks more of the arguments than the equality of all tensors. `add` is the argument of NcclCalls::put().
void call(const char* name, std::optional<ReduceOp> op, std::optional<int> global_root, std::span<const Tensor> tensors,
          const Group& group, FunctionRef<void(DeviceBackend&)> check, const cuda::NcclCalls::Add& add) {
  ProcessGroup& ranks = process_group(group);
  std::vector<Device> devices;
  for (const Tensor& tensor : tensors) devices.push_back(tensor.device());
  What what{.name = name, .op = op};
  // All ranks throw if the root is not in the group.
  if (global_root) what.root = rank_in_group(ranks, *global_root).value_or(-1);
  if (!tensors.empty()) {
    what.dtype = tensors.front().dtype();
    what.shape = &tensors.front().shape();
  }
  const auto prepare = [&](DeviceBackend& backend) {
    if (op) {
      merge::check_reducible(collectives::combine_of(*op), what.dtype);
      backend.check_reducible(collectives::combine_of(*op), what.dtype);
    }
    for (const Tensor& tensor : tensors) {
      collectives::check_same(tensor, tensors.front(), "a tensor");
      (void)collectives::room_of(tensor, &backend);
    }
    check(backend);
  };
  const auto move = [&](DeviceBackend& backend, const collectives::CallSummary& card, const collectives::Opened& opened,
                        const WaitOptions& options) {
    calls_of(backend).open(card, opened, options);
    calls_of(backend).put(options, [&](std::size_t lane, Communicator& communicator, StreamHandle stream) {
      if (tensors.front().nbytes() != 0) add(lane, communicator, stream);
    });
  };
  try {
    collectives::engine_of(ranks).on_devices(what, devices, {}, prepare, move);
  } catch (const Error& error) {
    if (what.root != -1 || error.kind() != ErrorKind::invalid_argument) throw;
    throw Error(ErrorKind::invalid_argument, fmt::format("rank {} is not in this group", *global_root));
  }
}

/// Returns the NCCL rank of the first device of a rank.
int first_of(int global, std::span<const Tensor> tensors, const Group& group) {
  return rank_in_group(process_group(group), global).value_or(0) * static_cast<int>(tensors.size());
}

constexpr auto no_more_checks = [](DeviceBackend&) {};

}  // namespace

void broadcast_multigpu(std::span<const Tensor> tensors, int src, const Group& group) {
  const int root = first_of(src, tensors, group);
  call("broadcast_multigpu", {}, src, tensors, group, no_more_checks,
       [&](std::size_t lane, Communicator& communicator, StreamHandle stream) {
         const auto data = device_pointer(tensors[lane].data());
         communicator.broadcast(data, data, tensors[lane].nbytes(), root, stream);
       });
}

void all_reduce_multigpu(std::span<const Tensor> tensors, ReduceOp op, const Group& group) {
  call("all_reduce_multigpu", op, {}, tensors, group, no_more_checks,
       [&](std::size_t lane, Communicator& communicator, StreamHandle stream) {
         const auto data = device_pointer(tensors[lane].data());
         const auto what = cuda::nccl_reduction(collectives::combine_of(op), tensors[lane].dtype());
         communicator.all_reduce(data, data, tensors[lane].nbytes(), what, stream);
       });
}

void reduce_multigpu(std::span<const Tensor> tensors, int dst, ReduceOp op, const Group& group) {
  const int root = first_of(dst, tensors, group);
  const bool is_root = rank_in_group(process_group(group), dst) == process_group(group).rank();
  call("reduce_multigpu", op, dst, tensors, group, no_more_checks,
       [&](std::size_t lane, Communicator& communicator, StreamHandle stream) {
         const auto data = device_pointer(tensors[lane].data());
         const auto what = cuda::nccl_reduction(collectives::combine_of(op), tensors[lane].dtype());
         communicator.reduce(data, is_root && lane == 0 ? data : 0, tensors[lane].nbytes(), what, root, stream);
       });
}

void all_gather_multigpu(std::span<const std::vector<Tensor>> outputs, std::span<const Tensor> tensors,
                         const Group& group) {
  const auto self = static_cast<std::size_t>(process_group(group).rank());
  const std::size_t all = static_cast<std::size_t>(process_group(group).size()) * tensors.size();
  const auto check = [&](DeviceBackend& backend) {
    if (outputs.size() != tensors.size())
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("all_gather_multigpu: {} lists of results for {} tensors. Pass one per tensor",
                              outputs.size(), tensors.size()));
    for (std::size_t lane = 0; lane < outputs.size(); ++lane) {
      if (outputs[lane].size() != all)
        throw Error(
            ErrorKind::invalid_argument,
            fmt::format("all_gather_multigpu: a list has {} results for {} tensors of all ranks. Pass one per tensor",
                        outputs[lane].size(), all));
      for (const Tensor& out : outputs[lane]) {
        collectives::check_same(out, tensors[lane], "a result");
        if (out.device() != tensors[lane].device())
          throw Error(ErrorKind::invalid_argument,
                      fmt::format("all_gather_multigpu: a result is on {}, but the tensor of its list on {}",
                                  to_string(out.device()), to_string(tensors[lane].device())));
        (void)collectives::room_of(out, &backend);
      }
    }
  };
  call("all_gather_multigpu", {}, {}, tensors, group, check,
       [&](std::size_t lane, Communicator& communicator, StreamHandle stream) {
         // The results are separate tensors, so each device's tensor needs a broadcast.
         for (std::size_t giver = 0; giver < all; ++giver) {
           const auto out = device_pointer(outputs[lane][giver].data());
           const bool is_mine = giver == self * tensors.size() + lane;
           communicator.broadcast(is_mine ? device_pointer(tensors[lane].data()) : out, out, tensors[lane].nbytes(),
                                  static_cast<int>(giver), stream);
         }
       });
}

}  // namespace muster::dist
