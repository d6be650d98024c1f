// SPDX-License-Identifier: Apache-2.0
// The public functions of libmuster-cuda.

#include "muster/cuda.hpp"
#include <fmt/core.h>
#include <exception>
#include <optional>
#include <utility>
#include "muster/error.hpp"
#include "muster/group.hpp"
#include "src/cuda/copy_queue.hpp"
#include "src/cuda/driver.hpp"
#include "src/cuda/functions.hpp"
#include "src/cuda/nccl.hpp"
#include "src/cuda/staging.hpp"

namespace muster {
using namespace cuda;

bool cuda_available() noexcept {
  return find_driver() != nullptr;
}

std::string cuda_unavailable_reason() {
  std::string reason;
  if (find_driver(&reason) != nullptr) return {};
  return reason.empty() ? "the CUDA driver cannot be used" : reason;
}

TensorView cuda_view(DType dtype, Shape shape, const void* data, Strides strides) {
  if (byte_size(dtype, shape) == 0) return {dtype, std::move(shape), data, std::move(strides)};
  const auto located = locate(data);
  if (!located)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("cuda_view: the address of a tensor of shape {} is not on a device. Use a TensorView for "
                            "host memory, and copy managed memory to the host or to a device first",
                            to_string(shape)));
  return {dtype, std::move(shape), data, std::move(strides), {Device::Kind::cuda, located->device}};
}

Tensor cuda_allocate(DType dtype, Shape shape, int device) {
  const std::size_t bytes = byte_size(dtype, shape);
  if (bytes == 0)
    return {TensorView(dtype, std::move(shape), nullptr, {}, {Device::Kind::cuda, device}), nullptr, nullptr};
  const Current current(device);
  DevicePointer pointer = 0;
  check(driver().allocate(&pointer, bytes), fmt::format("allocating {} bytes on cuda:{}", bytes, device));
  const std::shared_ptr<const void> owner(address_of(pointer), [device](const std::byte* memory) {
    on_device_if_there(device, [&](const DriverFunctions& functions) { functions.free(device_pointer(memory)); });
  });
  std::byte* const data = address_of(pointer);
  return {TensorView(dtype, std::move(shape), data, {}, {Device::Kind::cuda, device}), owner, data};
}

Tensor copy_to_host(const TensorView& tensor) {
  if (tensor.device().is_host() || tensor.nbytes() == 0) return Tensor::copy_of(tensor);
  (void)require_pitched(tensor);
  Tensor copy = Tensor::allocate(tensor.dtype(), tensor.shape());
  // The group has a single rank. It supplies the deadline that all waits have.
  const std::shared_ptr<Group> group = single_group();
  CopyQueue queue(tensor.device().index);
  queue.follow_caller();
  queue.bounce_to_host(tensor, copy.mutable_data(), *pinned_pool_of_process(), *group, {.phase = "copy_to_host"});
  return copy;
}

Config config_to_host(const Config& config) {
  DeviceState state;
  state.pinned = pinned_pool_of_process();
  HostCopy copy(config, state);
  copy.start();
  const std::shared_ptr<Group> group = single_group();
  copy.finish(*group, {.phase = "copy_to_host"});
  return copy.take();
}

Tensor copy_to_device(const TensorView& tensor, int device) {
  if (!tensor.is_contiguous()) return copy_to_device(Tensor::copy_of(tensor).view(), device);
  Tensor copy = cuda_allocate(tensor.dtype(), tensor.shape(), device);
  if (tensor.nbytes() == 0) return copy;
  const std::shared_ptr<Group> group = single_group();
  CopyQueue queue(device);
  queue.keep(copy.owner());
  queue.follow_caller();
  queue.bounce_to_device(tensor.host_data(), device_pointer(copy.data()), tensor.nbytes(), *pinned_pool_of_process(),
                         *group, {.phase = "copy_to_device"});
  return copy;
}

CudaStreamScope::CudaStreamScope(CUstream_st* stream) {
  const NamedStream before = name_stream({stream, device_of(stream)});
  before_ = before.handle;
  before_device_ = before.device;
}

CudaStreamScope::~CudaStreamScope() {
  name_stream({before_, before_device_});
}

CudaReport query_cuda() {
  CudaReport report;
  report.unavailable_reason = cuda_unavailable_reason();
  if (report.unavailable_reason.empty()) {
    int version = 0;
    check(driver().driver_version(&version), "reading the version of the CUDA driver");
    report.driver = fmt::format("{}.{}", version / 1000, version % 1000 / 10);
    for (int device = 0; device < device_count(); ++device)
      report.devices.push_back(fmt::format("cuda:{} {}, {:.1f} GiB", device, device_name(device),
                                           static_cast<double>(device_memory(device)) / (1 << 30)));
  }
  if (find_nccl(&report.nccl_unavailable_reason) != nullptr) report.nccl = nccl_version();
  return report;
}

}  // namespace muster

extern "C" bool muster_cuda_report(muster::CudaReport& report) {
  try {
    report = muster::query_cuda();
    return true;
  } catch (const std::exception& error) {
    report.unavailable_reason = error.what();
    return false;
  }
}

namespace muster::cuda {
namespace {

void order(int device, StreamHandle before, StreamHandle after) {
  const Current current(device);
  Event event(device);
  event.record(before == nullptr ? legacy_stream() : before);
  check(driver().stream_wait_event(after == nullptr ? legacy_stream() : after, event.handle(), 0),
        fmt::format("ordering two streams of cuda:{}", device));
}

}  // namespace
}  // namespace muster::cuda

extern "C" const muster::cuda::Functions& muster_cuda_functions() {
  static constexpr muster::cuda::Functions functions{
      .view = muster::cuda_view, .copy_to_host = muster::copy_to_host, .order = muster::cuda::order};
  return functions;
}

namespace muster {
using namespace cuda;

namespace {

const GraphFunctions& graphs() {
  static GraphFunctions functions;
  static const Missing missing = ((void)driver(), find_functions("libcuda.so.1", functions));
  if (!missing.function.empty())
    throw Error(
        ErrorKind::unsupported,
        fmt::format(
            "the CUDA driver does not have the function {}: graphs need version 11.4 or later. Update the driver",
            missing.function));
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
  if (handle_ == nullptr) throw Error(ErrorKind::invalid_argument, "graph: it is empty, so it cannot be launched");
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

  CopyStream stream;
  bool is_open = false;
  std::optional<CudaStreamScope> scope;
};

CudaGraphCapture::CudaGraphCapture(int device) : state_(std::make_unique<State>(device)) {}
CudaGraphCapture::~CudaGraphCapture() = default;

CUstream_st* CudaGraphCapture::stream() const noexcept {
  return state_->stream.handle();
}

CudaGraph CudaGraphCapture::end() {
  if (!state_->is_open) throw Error(ErrorKind::invalid_argument, "capture: it has already ended");
  const int device = state_->stream.device();
  const Current current(device);
  const auto [status, graph] = state_->close();
  check(status,
        fmt::format("ending the capture of a stream of cuda:{} (a call that a graph cannot contain invalidates it)",
                    device));
  GraphExecHandle exec = nullptr;
  const Status made = graphs().instantiate(&exec, graph, 0);
  graphs().destroy(graph);
  check(made, fmt::format("creating a graph of the captured calls on cuda:{}", device));
  return {device, exec};
}

}  // namespace muster
