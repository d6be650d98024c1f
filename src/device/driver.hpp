// SPDX-License-Identifier: Apache-2.0
#pragma once
// The CUDA driver of this process: loaded when it is first asked for, never unloaded (it has threads and handlers of
// its own). The devices that it sees, their primary contexts (which are those of the CUDA runtime), and what is known
// of an address on them. Everything here is thread-safe.

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "muster/tensor.hpp"
#include "src/device/driver_api.hpp"

namespace muster::cuda {

/// The driver, started. Throws Error(unsupported) with the remedy where there is none, where it has no device, and in a
/// process that was forked from one that had used it: its devices cannot be reached from there.
const DriverFunctions& driver();
/// The same without an exception: null, and why in `reason`.
const DriverFunctions* find_driver(std::string* reason = nullptr) noexcept;

/// Loads a library for good and finds the functions of a table. What is missing: the library, in the loader's words, or
/// the first function that it has not.
struct Missing {
  std::string library;
  std::string function;
};
Missing find_functions(const char* library_name, FunctionTable& table);

/// Throws where `status` is not success: Error(no_space) for memory, else Error(io), with `attempted` ("copying from
/// cuda:0 to page-locked memory") and the driver's own name and words.
void check(Status status, std::string_view attempted);
/// "CUDA_ERROR_OUT_OF_MEMORY: out of memory".
std::string words_of(Status status);

/// Throws as driver().
int device_count();
/// The primary context of a device: kept once it was asked for, until the process ends. Throws Error(argument) where
/// there is no such device.
Context primary_context(int device);
/// 48 bits, not 0. The same on every host that sees the device, and the same of all parts of a divided one (MIG): NCCL
/// refuses ranks on two parts of one (by their bus, at least to 2.29), and is not asked to join them.
std::uint64_t device_identity(int device);
/// "NVIDIA H200".
std::string device_name(int device);
std::uint64_t device_memory(int device);
/// The greatest distance of rows that it copies in one go.
std::uint64_t device_max_pitch_bytes(int device);
/// The thread's current device, where it has one.
std::optional<int> current_device();

/// While it lives, calls of this thread that a stream capture elsewhere in the process would forbid (asking events,
/// taking memory) are allowed, and do that capture no harm: nothing of an exchange is a part of a graph.
class BesideCaptures {
 public:
  BesideCaptures() noexcept;
  ~BesideCaptures();
  BesideCaptures& operator=(BesideCaptures&&) = delete;

 private:
  int mode_;
};

/// Makes a device the thread's current one; the one before it comes back at the end.
class Current {
 public:
  explicit Current(int device);
  /// The device of a context, be it its primary one or not.
  explicit Current(Context context);
  ~Current();
  Current& operator=(Current&&) = delete;

 private:
  BesideCaptures beside_;
};

/// For destructors: calls `work(driver)` with the device as the current one; does nothing where the driver has gone, in
/// a forked child, and where the device cannot be reached any more.
template <class Work>
void on_device_if_there(int device, const Work& work) noexcept {
  const DriverFunctions* const functions = find_driver();
  if (functions == nullptr) return;
  try {
    const Current current(device);
    work(*functions);
  } catch (const std::exception&) {
    // What it had went with the device.
  }
}

/// An address on a device.
struct Located {
  int device = 0;
  std::uint64_t buffer = 0;    ///< of the allocation: never used again in this process, unlike its address
  bool is_exportable = false;  ///< other processes can open the allocation by CUDA IPC
};
/// None where the address is not of a device: host memory, page-locked or not, and memory that the driver moves between
/// host and devices (cudaMallocManaged).
std::optional<Located> locate(const void* address);

/// The same of a tensor's elements. Throws Error(argument) where they are not where its view says.
Located locate(const TensorView& tensor);

struct Allocation {
  DevicePointer base = 0;
  std::size_t bytes = 0;
};
/// The whole allocation that an address is in. Throws Error(io).
Allocation allocation_of(const void* address);

inline DevicePointer device_pointer(const void* address) noexcept {
  return static_cast<DevicePointer>(reinterpret_cast<std::uintptr_t>(address));
}
inline std::byte* address_of(DevicePointer pointer) noexcept {
  return reinterpret_cast<std::byte*>(std::uintptr_t{pointer});  // NOLINT(performance-no-int-to-ptr): as CUDA has it
}

}  // namespace muster::cuda
