// SPDX-License-Identifier: Apache-2.0
#pragma once
// The CUDA driver of this process, its devices, their primary contexts (which the CUDA runtime also uses), and the
// properties of device addresses. The driver is loaded at its first use and never unloaded, because it has threads and
// handlers of its own. Everything here is thread-safe.

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "muster/tensor.hpp"
#include "src/cuda/driver_api.hpp"

namespace muster::cuda {

/// Returns the initialised driver. Throws Error(unsupported) with a remedy if there is no driver or no device. Also
/// throws it in a process that was forked from one that had used the driver, where the devices cannot be used.
const DriverFunctions& driver();
/// Like driver(), but returns null on failure and sets `reason`.
const DriverFunctions* find_driver(std::string* reason = nullptr) noexcept;

/// The result of find_functions: the error message of the loader if the library is missing, or the first function that
/// it does not contain. Both are empty on success.
struct Missing {
  std::string library;
  std::string function;
};
/// Loads a library permanently, and finds the functions of a table in it.
Missing find_functions(const char* library_name, FunctionTable& table);

/// Throws if `status` is not success: Error(no_space) for memory, otherwise Error(io). The message contains `attempted`
/// ("copying from cuda:0 to page-locked memory") and the driver's name and description of the status.
void check(Status status, std::string_view attempted);
/// Returns the name and description of a status: "CUDA_ERROR_OUT_OF_MEMORY: out of memory".
std::string words_of(Status status);

/// Throws as driver().
int device_count();
/// Returns the primary context of a device, which is kept from the first call until the process ends. Throws
/// Error(argument) if there is no such device.
Context primary_context(int device);
/// Returns a number of 48 bits, not 0. It is the same on every host that sees the device, and the same for all parts of
/// a divided device (MIG). NCCL (at least to 2.29) identifies devices by their bus and rejects ranks on two parts of
/// one device. So Muster does not ask NCCL to join such ranks.
std::uint64_t device_identity(int device);
/// Returns a name such as "NVIDIA H200".
std::string device_name(int device);
std::uint64_t device_memory(int device);
/// Returns the maximum pitch of a 2D copy.
std::uint64_t device_max_pitch_bytes(int device);
/// Returns the current device of this thread, if it has one.
std::optional<int> current_device();

/// While this object exists, this thread may make calls that a stream capture elsewhere in the process would forbid
/// (querying events, allocating memory). They do not disturb the capture. No operation of an exchange becomes part of a
/// graph.
class BesideCaptures {
 public:
  BesideCaptures() noexcept;
  ~BesideCaptures();
  BesideCaptures& operator=(BesideCaptures&&) = delete;

 private:
  int mode_;
};

/// Makes a device the current one of the thread. The destructor restores the previous one.
class Current {
 public:
  explicit Current(int device);
  /// Makes a context current, whether it is the primary context of its device or not.
  explicit Current(Context context);
  ~Current();
  Current& operator=(Current&&) = delete;

 private:
  BesideCaptures beside_;
};

/// For destructors: calls `work(driver)` with the device as the current one. Does nothing if the driver was unloaded,
/// in a forked child, or if the device can no longer be used.
template <class Work>
void on_device_if_there(int device, const Work& work) noexcept {
  const DriverFunctions* const functions = find_driver();
  if (functions == nullptr) return;
  try {
    const Current current(device);
    work(*functions);
  } catch (const std::exception&) {
    // The resources were lost together with the device.
  }
}

/// The device and the allocation of an address.
struct Located {
  int device = 0;
  /// Identifies the allocation; unlike its address, the number is never reused in this process.
  std::uint64_t buffer = 0;
  bool is_exportable = false;  ///< other processes can open the allocation by CUDA IPC
};
/// Returns nullopt if the address is not on a device: host memory, page-locked or not, and memory that the driver moves
/// between host and devices (cudaMallocManaged).
std::optional<Located> locate(const void* address);

/// Locates the elements of a tensor. Throws Error(argument) if they are not on the device that its view names.
Located locate(const TensorView& tensor);

struct Allocation {
  DevicePointer base = 0;
  std::size_t bytes = 0;
};
/// Returns the allocation that contains an address. Throws Error(io).
Allocation allocation_of(const void* address);

inline DevicePointer device_pointer(const void* address) noexcept {
  return static_cast<DevicePointer>(reinterpret_cast<std::uintptr_t>(address));
}
inline std::byte* address_of(DevicePointer pointer) noexcept {
  return reinterpret_cast<std::byte*>(std::uintptr_t{pointer});  // NOLINT(performance-no-int-to-ptr): as CUDA has it
}

}  // namespace muster::cuda
