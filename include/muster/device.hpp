// SPDX-License-Identifier: Apache-2.0
#pragma once
// Device: the location of the elements of a tensor. The CPU can read host memory. Tensors on a GPU are transferred by
// the device route (muster/cuda.hpp).

#include <cstdint>
#include <string>

namespace muster {

/// The location of a tensor: host memory, or a GPU and its index.
struct Device {
  /// The kind of memory.
  enum class Kind : std::uint8_t {
    host,  ///< memory of the process, on any NUMA node
    cuda,  ///< an NVIDIA GPU
  };
  /// The kind of memory that holds the elements.
  Kind kind = Kind::host;
  int index = 0;  ///< index among the GPUs that this process sees; 0 for the host

  /// Returns whether the tensor is in host memory.
  [[nodiscard]] bool is_host() const noexcept { return kind == Kind::host; }
  friend bool operator==(const Device&, const Device&) = default;
};

/// Returns "host" or "cuda:0".
std::string to_string(const Device& device);

}  // namespace muster
