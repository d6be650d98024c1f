// SPDX-License-Identifier: Apache-2.0
#include "muster/cuda_graph.hpp"

#include <fmt/core.h>

#include <optional>
#include <utility>

#include "muster/error.hpp"
#include "src/device/copy_queue.hpp"
#include "src/device/driver.hpp"
#include "src/device/driver_api.hpp"

namespace muster {
using namespace cuda;

namespace {

const GraphFunctions& graphs() {
  static GraphFunctions functions;
  static const Missing missing = ((void)driver(), find_functions("libcuda.so.1", functions));
  if (!missing.function.empty())
    throw Error(
        ErrorKind::unsupported,
        fmt::format("the CUDA driver has no function {}: graphs need 11.4 or later, update it", missing.function));
  return functions;
}

}  // namespace

CudaGraph::CudaGraph(CudaGraph&& other) noexcept
    : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}

CudaGraph& CudaGraph::operator=(CudaGraph&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(handle_, other.handle_);
  return *this;
}

CudaGraph::~CudaGraph() {
  if (handle_ == nullptr) return;
  on_device_if_there(device_, [&](const DriverFunctions&) { graphs().destroy_exec(handle_); });
}

void CudaGraph::launch(CUstream_st* stream) const {
  if (handle_ == nullptr) throw Error(ErrorKind::argument, "there is no graph to launch");
  const Current current(device_);
  check(graphs().launch(handle_, stream), fmt::format("launching a graph on cuda:{}", device_));
}

struct CudaGraphCapture::State {
  explicit State(int device) : stream(device) {
    const Current current(device);
    check(graphs().begin_capture(stream.handle(), capture_mode_thread_local),
          fmt::format("beginning to capture a stream of cuda:{}", device));
    is_open = true;
    scope.emplace(stream.handle());
  }
  ~State() {
    if (!is_open) return;
    on_device_if_there(stream.device(), [&](const DriverFunctions&) {
      if (const GraphHandle graph = close().second) graphs().destroy(graph);
    });
  }
  State& operator=(State&&) = delete;

  std::pair<Status, GraphHandle> close() {
    is_open = false;
    scope.reset();
    GraphHandle graph = nullptr;
    const Status status = graphs().end_capture(stream.handle(), &graph);
    return {status, graph};
  }

  Stream stream;
  bool is_open = false;
  std::optional<CudaStreamScope> scope;
};

CudaGraphCapture::CudaGraphCapture(int device) : state_(std::make_unique<State>(device)) {}
CudaGraphCapture::~CudaGraphCapture() = default;

CUstream_st* CudaGraphCapture::stream() const noexcept {
  return state_->stream.handle();
}

CudaGraph CudaGraphCapture::end() {
  if (!state_->is_open) throw Error(ErrorKind::argument, "the capture has ended already");
  const int device = state_->stream.device();
  const Current current(device);
  const auto [status, graph] = state_->close();
  check(status, fmt::format("ending the capture of a stream of cuda:{} (a call that cannot be a part of a graph spoils "
                            "it)",
                            device));
  GraphExecHandle exec = nullptr;
  const Status made = graphs().instantiate(&exec, graph, 0);
  graphs().destroy(graph);
  check(made, fmt::format("making a graph of what was captured on cuda:{}", device));
  return {device, exec};
}

}  // namespace muster
