// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared functions of the device route's tests: tensors on devices, work that is queued and late, and counters of the
// fake driver.

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

#include "doctest/doctest.h"
#include "muster/cuda.hpp"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "src/cuda/driver.hpp"
#include "src/cuda/memory_pool.hpp"
#include "tests/support/exchanges.hpp"

namespace muster::test {

/// Returns whether the tests run over a real driver (MUSTER_TEST_DRIVER=real, as tests/device/on_gpu sets it).
inline bool is_driver_real() {
  const char* const driver = std::getenv("MUSTER_TEST_DRIVER");
  return driver != nullptr && std::string_view(driver) == "real";
}
/// Marks a case that needs the fake driver, because it causes failures or needs several devices.
inline const doctest::skip over_fake(is_driver_real());

/// Returns a function of the fake driver, or of the fake NCCL.
template <class Function>
Function* fake(const char* library, const char* name) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  void* const symbol = handle == nullptr ? nullptr : ::dlsym(handle, name);
  if (symbol == nullptr) throw RankFailure(std::string(name) + " is not there: is this the fake driver?");
  return reinterpret_cast<Function*>(symbol);
}

/// A number that the fake driver counts. A real driver does not have it, so each comparison with it is then true.
class Counted {
 public:
  explicit Counted(std::optional<std::uint64_t> number) : number_(number) {}
  friend bool operator==(const Counted& a, std::uint64_t b) { return !a.number_ || *a.number_ == b; }
  friend bool operator==(const Counted& a, const Counted& b) { return !b.number_ || a == *b.number_; }
  friend Counted operator+(const Counted& a, std::uint64_t b) {
    return Counted(a.number_ ? std::optional(*a.number_ + b) : std::nullopt);
  }
  friend bool operator<=(const Counted& a, std::uint64_t b) { return !a.number_ || *a.number_ <= b; }
  friend bool operator>=(const Counted& a, std::uint64_t b) { return !a.number_ || *a.number_ >= b; }

 private:
  std::optional<std::uint64_t> number_;
};
template <class... Arguments>
Counted counted(const char* function, Arguments... arguments) {
  if (is_driver_real()) return Counted(std::nullopt);
  return Counted(fake<std::uint64_t(Arguments...)>("libcuda.so.1", function)(arguments...));
}
inline Counted calls(const char* function) {
  return counted("fake_cuda_calls", function);
}
inline Counted still_open(const char* what) {
  return counted("fake_cuda_open", what);
}
inline Counted pageable_copies() {
  return counted("fake_cuda_pageable_copies");
}

/// Returns the number of an existing device. The fake driver has as many devices as a test names.
inline int device_at(int number) {
  return is_driver_real() ? number % cuda::device_count() : number;
}
inline Tensor on_device(const TensorView& tensor, int device = 0) {
  return copy_to_device(tensor, device_at(device));
}
inline Tensor device_pattern(DType dtype, Shape shape, std::uint64_t seed, int device = 0) {
  return on_device(pattern(dtype, std::move(shape), seed), device);
}

inline GatherOptions landing_at(Destination landing) {
  GatherOptions options;
  options.devices.destination = landing;
  return options;
}
/// Options of a gather whose result is on the root's device.
inline GatherOptions to_device() {
  return landing_at(Destination::device);
}

/// Returns a copy in page-locked memory. Only copies from such memory are queued without a wait for the stream.
inline Tensor page_locked(const TensorView& tensor) {
  const cuda::Current current(0);
  const auto buffer = cuda::pinned_pool_of_process()->take(tensor.nbytes());
  std::memcpy(buffer.data.get(), tensor.data(), tensor.nbytes());
  return {TensorView(tensor.dtype(), tensor.shape(), buffer.data.get()), buffer.data};
}

/// A stream of the caller, on which work is pending.
class UserStream {
 public:
  explicit UserStream(int device, bool is_blocking = false) : device_(device_at(device)) {
    const cuda::Current current(device_);
    cuda::check(cuda::driver().stream_create(&handle_, is_blocking ? 0 : cuda::stream_non_blocking), "a stream");
  }
  ~UserStream() {
    const cuda::Current current(device_);
    cuda::driver().stream_destroy(handle_);
  }
  UserStream(const UserStream&) = delete;
  UserStream& operator=(const UserStream&) = delete;
  [[nodiscard]] cuda::StreamHandle handle() const { return handle_; }
  /// Queues a copy without waiting. `from` must be page-locked, and live until the copy is done.
  void write(const TensorView& target, const TensorView& from) const {
    const cuda::Current current(device_);
    cuda::check(cuda::driver().copy_to_device(cuda::device_pointer(target.data()), from.data(), from.nbytes(), handle_),
                "writing");
  }
  void write_all(const TensorView& target, const std::vector<Tensor>& work) const {
    for (const Tensor& each : work) write(target, each);
  }

 private:
  int device_;
  cuda::StreamHandle handle_ = nullptr;
};

/// Page-locked patterns, to be written in succession.
inline std::vector<Tensor> work_of(const std::vector<std::uint64_t>& seeds, std::int64_t bytes = 100000) {
  std::vector<Tensor> work;
  for (const std::uint64_t seed : seeds) work.push_back(page_locked(pattern(DType::u8, {bytes}, seed)));
  return work;
}
/// Returns so many seeds that a reader which does not wait for all writes finds another one than the last.
inline std::vector<std::uint64_t> many_seeds(std::uint64_t first, std::uint64_t step) {
  std::vector<std::uint64_t> seeds;
  for (std::uint64_t i = 0; i <= 20; ++i) seeds.push_back(first + i * step);
  return seeds;
}

inline std::vector<int> all_of(const Group& group) {
  return ranks_from(0, group.size());
}

/// Gathers on rank 0 a pattern like `mine` from every rank. Its seed is `seed` plus `per_rank` times the rank.
inline GatheredTensors gather_patterns(Group& group, const TensorView& mine, std::uint64_t seed,
                                       const GatherOptions& options = {}, std::uint64_t per_rank = 0) {
  GatheredTensors all = get_tensors_parallel(mine, all_of(group), group, options);
  RANK_CHECK(all.present().size() == (group.rank() == 0 ? static_cast<std::size_t>(group.size()) : 0));
  for (const auto& [rank, tensor] : all.present())
    RANK_CHECK(is_pattern(copy_to_host(tensor), mine.dtype(), mine.shape(),
                          seed + per_rank * static_cast<std::uint64_t>(rank)));
  return all;
}

}  // namespace muster::test
