// SPDX-License-Identifier: Apache-2.0
#pragma once
// DeviceBackend: what moves the elements of collectives that are on devices, and takes memory there. libmuster-cuda has
// one, and registers it when it is loaded: this library knows nothing of CUDA.
//
// A call is the one of Backend, with the same round on the CPU. What moves is put into a stream of the device, and the
// call returns before it has. Bytes and Room are addresses on the device: the CPU does not look there.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "muster/tensor.hpp"
#include "src/collectives/backend.hpp"

namespace muster::collectives {

/// Where the tensors of a rank's call are.
struct Place {
  std::uint64_t devices = 0;  ///< which, by a number that is the same on every host that sees them
  // The same on all ranks.
  std::uint32_t count = 0;   ///< of devices; 0: in host memory
  bool is_captured = false;  ///< the call becomes a part of a graph

  /// Of what is the same on all ranks.
  [[nodiscard]] std::uint64_t hash() const noexcept { return 2 * std::uint64_t{count} + (is_captured ? 1 : 0); }
  /// What messages add to a call: " on a device".
  [[nodiscard]] std::string words() const;
};

/// What devices the tensors of a call are on, as Engine takes it: none if they are in host memory.
inline std::span<const Device> devices_of(const TensorView& tensor) noexcept {
  return tensor.device().is_host() ? std::span<const Device>() : std::span(&tensor.device(), 1);
}

class DeviceBackend : public Backend {
 public:
  /// Begins a call of this rank with tensors on these devices, one on each of them. Local. Throws Error(argument |
  /// unsupported | io), as all of these do.
  virtual Place begin(std::span<const Device> devices) = 0;

  // Of the call that has begun, on its device.

  /// The elements of a tensor without gaps.
  [[nodiscard]] virtual Bytes bytes_of(const TensorView& tensor) const = 0;
  virtual void check_reducible(merge::Combine combine, DType dtype) const = 0;
  /// Throws if memory cannot be taken: in a graph.
  virtual void check_can_allocate() const = 0;
  [[nodiscard]] virtual Tensor allocate(DType dtype, Shape shape) = 0;
  /// Slices along a dimension, one behind the other.
  [[nodiscard]] virtual Tensor cut(const TensorView& tensor, std::size_t dim,
                                   std::span<const std::int64_t> extents) = 0;
  /// Parts that lie one behind the other, each of so many rows, as the rows of one tensor.
  [[nodiscard]] virtual Tensor join(const Tensor& parts, std::span<const std::uint64_t> sizes, std::uint64_t rows) = 0;

  /// Returns when this rank's devices have done what its calls have put into their streams. What fails is the failure
  /// of the group.
  virtual void wait(const WaitOptions& options) = 0;
  /// The group has failed: what is under way would never end. The next call meets anew.
  virtual void abort() noexcept = 0;
};

/// `round` is what the group's calls for host memory go by; its rounds are those of calls on devices, too.
using MakeDeviceBackend = std::unique_ptr<DeviceBackend> (*)(sync::Group& group, Backend& round);
void set_device_backend(MakeDeviceBackend make) noexcept;
/// Whether a library of this program has one.
[[nodiscard]] bool has_device_backend() noexcept;
/// Throws Error(unsupported) if there is none.
std::unique_ptr<DeviceBackend> device_backend(sync::Group& group, Backend& round);

}  // namespace muster::collectives
