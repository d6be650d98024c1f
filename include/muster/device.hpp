// SPDX-License-Identifier: Apache-2.0
#pragma once
// Device: where a tensor's elements are. Host memory is what the CPU reads; what is on a device travels by the device
// route (muster/cuda.hpp).

#include <cstdint>
#include <string>

namespace muster {

struct Device {
  enum class Kind : std::uint8_t {
    host,  ///< the memory of the process, whichever NUMA node it is on
    cuda,  ///< an NVIDIA device
  };
  Kind kind = Kind::host;
  int index = 0;  ///< among the devices that this process sees; 0 for the host

  [[nodiscard]] bool is_host() const noexcept { return kind == Kind::host; }
  friend bool operator==(const Device&, const Device&) = default;
};

/// "host", "cuda:0".
std::string to_string(const Device& device);

}  // namespace muster
