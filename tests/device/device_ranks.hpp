// SPDX-License-Identifier: Apache-2.0
#pragma once
// What tests of the device route share: tensors on devices, work that is queued and late, and what the fake driver has
// counted.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "doctest/doctest.h"
#include "muster/cuda.hpp"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "src/device/driver.hpp"
#include "src/device/memory_pool.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"

namespace muster::test {

/// A function of the fake driver, or of the fake NCCL.
template <class Function>
Function* fake(const char* library, const char* name) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  void* const symbol = handle == nullptr ? nullptr : ::dlsym(handle, name);
  if (symbol == nullptr) throw RankFailure(std::string(name) + " is not there: is this the fake driver?");
  return reinterpret_cast<Function*>(symbol);
}
inline std::uint64_t calls(const char* function) {
  return fake<std::uint64_t(const char*)>("libcuda.so.1", "fake_cuda_calls")(function);
}
inline std::uint64_t still_open(const char* what) {
  return fake<std::uint64_t(const char*)>("libcuda.so.1", "fake_cuda_open")(what);
}
inline std::uint64_t pageable_copies() {
  return fake<std::uint64_t()>("libcuda.so.1", "fake_cuda_pageable_copies")();
}

inline Tensor on_device(const TensorView& tensor, int device = 0) {
  return copy_to_device(tensor, device);
}
inline Tensor device_pattern(DType dtype, Shape shape, std::uint64_t seed, int device = 0) {
  return on_device(pattern(dtype, std::move(shape), seed), device);
}

/// A gather whose result is on the first rank's device.
inline GatherOptions to_device() {
  GatherOptions options;
  options.devices.landing = Landing::device;
  return options;
}

/// A copy in page-locked memory: only what comes from there is queued without waiting for the stream.
inline Tensor page_locked(const TensorView& tensor) {
  const cuda::Current current(0);
  const auto buffer = cuda::pinned_pool_of_process()->take(tensor.nbytes());
  std::memcpy(buffer.data.get(), tensor.data(), tensor.nbytes());
  return {TensorView(tensor.dtype(), tensor.shape(), buffer.data.get()), buffer.data};
}

/// Of a test and the ranks it forks, or of a rank.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Setting() { ::unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
};

/// A stream of the caller's, on which work waits.
class UserStream {
 public:
  explicit UserStream(int device, bool is_blocking = false) : device_(device) {
    const cuda::Current current(device);
    cuda::check(cuda::driver().stream_create(&handle_, is_blocking ? 0 : cuda::stream_non_blocking), "a stream");
  }
  ~UserStream() {
    const cuda::Current current(device_);
    cuda::driver().stream_destroy(handle_);
  }
  UserStream(const UserStream&) = delete;
  UserStream& operator=(const UserStream&) = delete;
  [[nodiscard]] cuda::StreamHandle handle() const { return handle_; }
  /// Queued, not done: `from` is page-locked, and stays until it is.
  void write(const TensorView& target, const TensorView& from) const {
    const cuda::Current current(device_);
    cuda::check(cuda::driver().copy_to_device(cuda::device_pointer(target.data()), from.data(), from.nbytes(), handle_),
                "writing");
  }

 private:
  int device_;
  cuda::StreamHandle handle_ = nullptr;
};

inline std::vector<int> all_of(const SyncGroup& group) {
  return ranks_from(0, group.size());
}

}  // namespace muster::test
