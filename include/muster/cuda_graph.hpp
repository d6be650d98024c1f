// SPDX-License-Identifier: Apache-2.0
#pragma once
// Calls of a ProcessGroup as parts of a CUDA graph: captured once, run by one launch as often as is wanted. Semantics:
// graph_capture of vLLM's GroupCoordinator, and stream capture of CUDA. Programs that include this header link
// libmuster-cuda (pkg-config muster-cuda).
//
//   group.all_reduce(tensor);                 // NCCL meets, and sets up what it needs
//   muster::CudaGraphCapture capture(device);
//   kernels<<<..., capture.stream()>>>(tensor);
//   group.all_reduce(tensor);
//   const muster::CudaGraph graph = capture.end();
//   graph.launch(stream);
//
// What holds of collectives in a graph: docs/devices.md, "Collectives".

#include <memory>

#include "muster/cuda.hpp"

struct CUgraphExec_st;

namespace muster {

/// A graph that can be run. Movable.
class CudaGraph {
 public:
  CudaGraph() = default;
  CudaGraph(CudaGraph&& other) noexcept;
  CudaGraph& operator=(CudaGraph&& other) noexcept;
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  ~CudaGraph();

  /// Puts a run of it into a stream of its device, and returns. If it has collectives all ranks of their groups launch
  /// it, in one order with their other collectives. Tensors and groups that it uses must live until the run is over.
  /// Throws Error(argument) if there is no graph, Error(io) if the driver refuses.
  void launch(CUstream_st* stream) const;

 private:
  friend class CudaGraphCapture;
  CudaGraph(int device, CUgraphExec_st* handle) noexcept : device_(device), handle_(handle) {}

  int device_ = 0;
  CUgraphExec_st* handle_ = nullptr;
};

/// While it lives, what is put into its stream is not done but captured. The stream is a new one, and is named as by a
/// CudaStreamScope: this thread's collectives on its device go there. Used by one thread.
class CudaGraphCapture {
 public:
  /// Throws Error(argument) if there is no such device, Error(unsupported) if the driver is older than 11.4, Error(io).
  explicit CudaGraphCapture(int device);
  /// What was captured is dropped, if end() has not been called.
  ~CudaGraphCapture();
  CudaGraphCapture(const CudaGraphCapture&) = delete;
  CudaGraphCapture& operator=(const CudaGraphCapture&) = delete;

  [[nodiscard]] CUstream_st* stream() const noexcept;
  /// Ends the capture, once. The stream is not named any more. Throws Error(io) if the capture has been spoilt by a
  /// call that cannot be a part of a graph.
  [[nodiscard]] CudaGraph end();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster
