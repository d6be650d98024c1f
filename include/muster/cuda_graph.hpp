// SPDX-License-Identifier: Apache-2.0
#pragma once
// Captures calls of a ProcessGroup in a CUDA graph, which a single launch then replays any number of times. Programs
// that include this header link libmuster-cuda (pkg-config muster-cuda). Semantics: graph_capture of GroupCoordinator
// in vLLM, and stream capture of CUDA.
//
//  group.all_reduce(tensor);                 // NCCL connects and allocates its resources
//  muster::CudaGraphCapture capture(device);
//  kernels<<<..., capture.stream()>>>(tensor);
//  group.all_reduce(tensor);
//  const muster::CudaGraph graph = capture.end();
//  graph.launch(stream);
//
// The rules for collectives in a graph: docs/devices.md, "Collectives".

#include <memory>

#include "muster/cuda.hpp"

struct CUgraphExec_st;

namespace muster {

/// A CUDA graph that can be launched. Movable.
class CudaGraph {
 public:
  CudaGraph() = default;
  CudaGraph(CudaGraph&& other) noexcept;
  CudaGraph& operator=(CudaGraph&& other) noexcept;
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  ~CudaGraph();

  /// Queues one run of the graph in a stream of its GPU, and returns. If the graph contains collectives, all ranks of
  /// their groups launch it, in the same order relative to their other collectives. Tensors and groups that the graph
  /// uses must exist until the run is complete. Throws Error(argument) if the graph is empty, Error(io) if the driver
  /// fails.
  void launch(CUstream_st* stream) const;

 private:
  friend class CudaGraphCapture;
  CudaGraph(int device, CUgraphExec_st* handle) noexcept : device_(device), handle_(handle) {}

  int device_ = 0;
  CUgraphExec_st* handle_ = nullptr;
};

/// Captures the work that is queued in its stream instead of running it, as long as this object exists. The stream is
/// new, and is set for this thread as by a CudaStreamScope, so collectives of this thread on that GPU are captured. Use
/// it from one thread.
class CudaGraphCapture {
 public:
  /// Starts a capture on a GPU. Throws Error(argument) if the GPU does not exist, Error(unsupported) if the driver is
  /// older than 11.4, Error(io).
  explicit CudaGraphCapture(int device);
  /// Discards the capture if end() was not called.
  ~CudaGraphCapture();
  CudaGraphCapture(const CudaGraphCapture&) = delete;
  CudaGraphCapture& operator=(const CudaGraphCapture&) = delete;

  /// Returns the stream whose work is captured. Valid as long as this object.
  [[nodiscard]] CUstream_st* stream() const noexcept;
  /// Ends the capture and returns its graph; call it once. The stream is then no longer set for this thread. Throws
  /// Error(io) if a call that cannot be part of a graph has invalidated the capture.
  [[nodiscard]] CudaGraph end();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster
