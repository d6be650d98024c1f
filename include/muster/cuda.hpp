// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors on NVIDIA GPUs: views, the stream that exchanges synchronize with, and copies. Programs that include this
// header link libmuster-cuda (pkg-config muster-cuda), which contains the device route of gathers and the NCCL backend
// of collectives. No CUDA toolkit is needed: the driver is loaded when it is first used. docs/reference/gpu.md explains
// the rules and the choice of transfer methods.

#include <memory>
#include <string>
#include <vector>
#include "muster/config.hpp"
#include "muster/tensor.hpp"

// cudaStream_t and CUstream are pointers to this type.
struct CUstream_st;

namespace muster {

/// Returns whether this process has a driver and a GPU. Local; loads the driver.
[[nodiscard]] bool cuda_available() noexcept;
/// Returns why no GPU is available, with the remedy; empty if one is. Local.
[[nodiscard]] std::string cuda_unavailable_reason();

/// Returns a view of elements on a GPU. The driver determines which GPU it is. The caller keeps the memory alive.
/// Throws Error(invalid_argument) if `data` is not an address on a GPU. For host memory, page-locked or not, use a
/// TensorView; memory of cudaMallocManaged is not supported by either. Throws Error(unsupported) if no driver is
/// available, and as the constructor of TensorView.
TensorView cuda_view(DType dtype, Shape shape, const void* data, Strides strides = {});

/// Allocates uninitialized writable memory on a GPU (cuMemAlloc). Throws Error(out_of_space | argument | unsupported).
Tensor cuda_allocate(DType dtype, Shape shape, int device);

/// Returns a contiguous copy on the heap, of a tensor on the host or on a GPU. It synchronizes with the stream as an
/// exchange does, and returns when the copy is complete. Throws Error(invalid_argument) if a GPU cannot copy the
/// strides in one operation, Error(io) if the GPU fails.
Tensor copy_to_host(const TensorView& tensor);
/// Returns the tree with all its tensors on the host. Copies from GPUs are in page-locked memory, which is reused after
/// they are destroyed: use it for layers that are merged or written. All GPUs copy at the same time. Throws as
/// copy_to_host().
Config config_to_host(const Config& config);
/// Returns a contiguous copy on a GPU, of a tensor on the host. Throws as copy_to_host() and cuda_allocate().
Tensor copy_to_device(const TensorView& tensor, int device);

/// Sets the stream of the calling thread while the scope exists. Exchanges of this thread synchronize with the stream,
/// and its collectives are queued in it. Scopes nest, and the stream must outlive the scope.
///
/// An exchange reads elements after the work that was queued in the stream before the call. When the call returns,
/// nothing reads the elements any more, except through the root's views of its own tensors (RootTensors::borrow). The
/// scope applies to tensors on the GPU of the stream, whichever GPU is current. For tensors on other GPUs, and without
/// a scope, the stream is the default stream of the GPU. That stream waits for all streams that were not created as
/// non-blocking.
///
/// Exchanges throw Error(invalid_argument) while the stream is being captured into a graph; collectives become part of
/// the graph (muster/cuda.hpp). The constructor throws Error(invalid_argument) if the stream belongs to a context that
/// the program created itself (cuCtxCreate).
class CudaStreamScope {
 public:
  /// Sets `stream` for the calling thread. The destructor restores the previous stream.
  explicit CudaStreamScope(CUstream_st* stream);
  ~CudaStreamScope();
  CudaStreamScope(const CudaStreamScope&) = delete;
  CudaStreamScope& operator=(const CudaStreamScope&) = delete;

 private:
  CUstream_st* before_;
  int before_device_;
};

/// The CUDA installation of this machine, as `muster doctor` reports it.
struct CudaReport {
  std::string driver;                   ///< driver version, "12.9"; empty if no driver is available
  std::vector<std::string> devices;     ///< "cuda:0 NVIDIA H200, 139.8 GiB"
  std::string nccl;                     ///< NCCL version, "2.21.5"; empty if NCCL is not available
  std::string unavailable_reason;       ///< why no driver or no GPU is available; empty if one is
  std::string nccl_unavailable_reason;  ///< why NCCL is not available; empty if it is
};
/// Returns a report of the CUDA installation. Local; starts the driver if one is installed.
CudaReport query_cuda();

}  // namespace muster

struct CUgraphExec_st;

namespace muster {

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
// The rules for collectives in a graph: docs/reference/gpu.md, "Collectives".

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
  /// uses must exist until the run is complete. Throws Error(invalid_argument) if the graph is empty, Error(io) if the
  /// driver fails.
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
  /// Starts a capture on a GPU. Throws Error(invalid_argument) if the GPU does not exist, Error(unsupported) if the
  /// driver is older than 11.4, Error(io).
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
