// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors on NVIDIA devices: views of them, the stream that an exchange respects, where gathered tensors land. Programs
// that include this header link libmuster-cuda (pkg-config muster-cuda), which takes the gathers' device route and the
// collectives' NCCL backend with it.
// It needs no CUDA toolkit: the driver is loaded when it is first asked for. Rules and the choice of ways are in
// docs/devices.md.

#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/tensor.hpp"

// cudaStream_t and CUstream are pointers to it.
struct CUstream_st;

namespace muster {

/// Whether there are a driver and a device for this process. Local; loads the driver.
[[nodiscard]] bool cuda_available() noexcept;
/// Why there are none, with the remedy; empty if there are.
[[nodiscard]] std::string cuda_obstacle();

/// Views elements on a device; which one, the driver is asked. The memory is somebody else's, as with every view.
/// Throws Error(argument) if the address is not one of a device (of host memory, page-locked or not, make a
/// TensorView; memory that cudaMallocManaged moves to and fro is taken for neither), Error(unsupported) if there is
/// no driver, and as TensorView's constructor.
TensorView cuda_view(DType dtype, Shape shape, const void* data, Strides strides = {});

/// Fresh memory of a device (cuMemAlloc), not initialised; writable. Throws Error(no_space), and as above.
Tensor cuda_allocate(DType dtype, Shape shape, int device);

/// A contiguous copy on the heap, of a tensor wherever it is. Respects the stream as an exchange does, and returns when
/// the copy is there. Throws Error(argument) on strides that a device cannot copy in one go, Error(io) if the device
/// fails.
Tensor copy_to_host(const TensorView& tensor);
/// The tree with all its tensors on the host, those of devices in page-locked memory, which is used again when they are
/// gone: for layers that are merged or written. All devices copy at once. As above.
Config config_to_host(const Config& config);
/// A contiguous copy on a device, of a tensor that is on the host. As above.
Tensor copy_to_device(const TensorView& tensor, int device);

/// Names the stream that this thread's exchanges respect, and that its collectives are put into, as long as it lives.
/// Of an exchange: what has been queued there before a call is done before elements are read; and when the call
/// returns, nothing reads them any more (with Own::borrow, but for the views of the first rank's own). It counts for
/// tensors on its own device, whichever is current; for tensors on other devices, and without a scope, it is the
/// device's default stream, which waits for all streams that were not made non-blocking. Scopes nest. The stream must
/// live as long as the scope. Exchanges throw Error(argument) while it is being captured into a graph; collectives
/// become a part of that (muster/cuda_graph.hpp). The constructor throws Error(argument) on a stream of a context that
/// the program has made itself (cuCtxCreate).
class CudaStreamScope {
 public:
  explicit CudaStreamScope(CUstream_st* stream);
  ~CudaStreamScope();
  CudaStreamScope(const CudaStreamScope&) = delete;
  CudaStreamScope& operator=(const CudaStreamScope&) = delete;

 private:
  CUstream_st* before_;
  int before_device_;
};

/// What this machine has, as `muster doctor` tells it. Local; starts the driver, where there is one.
struct CudaReport {
  std::string driver;                ///< "12.9"; empty if there is none
  std::vector<std::string> devices;  ///< "cuda:0 NVIDIA H200, 139.8 GiB"
  std::string nccl;                  ///< "2.21.5"; empty if there is none
  std::string obstacle;              ///< why there is no driver or no device
  std::string nccl_obstacle;
};
CudaReport examine_cuda();

}  // namespace muster
