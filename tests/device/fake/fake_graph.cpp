// SPDX-License-Identifier: Apache-2.0
// The fake driver's graphs.

#include <algorithm>

#include "tests/device/fake/fake_cuda.hpp"
#include "tests/device/fake/fake_machine.hpp"

using namespace fake;

namespace {

constexpr auto capture_is_broken = static_cast<Status>(901);

Status drop(CUgraph_st* graph) {
  const auto erased = std::erase_if(state().graphs, [&](const auto& each) { return each.get() == graph; });
  return erased == 1 ? Status::success : invalid_handle;
}

}  // namespace

extern "C" {

Status cuStreamBeginCapture_v2(CUstream_st* stream, int) {
  ENTER("cuStreamBeginCapture_v2", in_context);
  if (stream->is_gone || stream->is_capturing || stream_of(stream) != stream) return Status::invalid_value;
  stream->is_capturing = true;
  stream->captured.clear();
  state().is_capture_broken = false;
  return Status::success;
}

Status cuStreamEndCapture(CUstream_st* stream, CUgraph_st** graph) {
  ENTER("cuStreamEndCapture", in_context);
  if (!stream->is_capturing) return Status::invalid_value;
  stream->is_capturing = false;
  *graph = nullptr;
  if (state().is_capture_broken) return capture_is_broken;
  state().graphs.push_back(std::make_unique<CUgraph_st>(CUgraph_st{stream->device, std::move(stream->captured)}));
  *graph = state().graphs.back().get();
  return Status::success;
}

Status cuGraphInstantiateWithFlags(CUgraph_st** exec, CUgraph_st* graph, unsigned long long) {
  ENTER("cuGraphInstantiateWithFlags", in_context);
  state().graphs.push_back(std::make_unique<CUgraph_st>(*graph));
  *exec = state().graphs.back().get();
  return Status::success;
}

Status cuGraphLaunch(CUgraph_st* exec, CUstream_st* stream) {
  ENTER("cuGraphLaunch", in_context);
  CUstream_st* const real = stream_of(stream);
  if (const Status usable = use(real); usable != Status::success) return usable;
  if (real->device != exec->device) return invalid_handle;
  for (const auto& step : exec->steps) put(real, step);
  return Status::success;
}

Status cuGraphDestroy(CUgraph_st* graph) {
  ENTER("cuGraphDestroy");
  return drop(graph);
}

Status cuGraphExecDestroy(CUgraph_st* exec) {
  ENTER("cuGraphExecDestroy");
  return drop(exec);
}

}  // extern "C"
