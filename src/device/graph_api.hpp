// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is used of the CUDA driver for graphs, declared as driver_api.hpp has the rest. A driver that is too old for it
// does everything else. Where cuda.h is found, tests/device/cuda_declarations.cpp compares.

#include "src/device/driver_api.hpp"

struct CUgraph_st;
struct CUgraphExec_st;

namespace muster::cuda {

using GraphHandle = ::CUgraph_st*;
using GraphExecHandle = ::CUgraphExec_st*;

/// CUstreamCaptureMode: what other threads do is no harm. NCCL has threads of its own.
inline constexpr int capture_mode_thread_local = 1;

struct GraphFunctions {
  Status (*begin_capture)(StreamHandle, int) = nullptr;
  Status (*end_capture)(StreamHandle, GraphHandle*) = nullptr;
  Status (*instantiate)(GraphExecHandle*, GraphHandle, unsigned long long) = nullptr;
  Status (*launch)(GraphExecHandle, StreamHandle) = nullptr;
  Status (*destroy)(GraphHandle) = nullptr;
  Status (*destroy_exec)(GraphExecHandle) = nullptr;
};

template <class Functions, class Use>
void for_each_graph_function(Functions& f, const Use& use) {
  use("cuStreamBeginCapture_v2", f.begin_capture);
  use("cuStreamEndCapture", f.end_capture);
  use("cuGraphInstantiateWithFlags", f.instantiate);
  use("cuGraphLaunch", f.launch);
  use("cuGraphDestroy", f.destroy);
  use("cuGraphExecDestroy", f.destroy_exec);
}

}  // namespace muster::cuda
