// SPDX-License-Identifier: Apache-2.0
#pragma once
// Backend: transfers the elements of collectives. It handles contiguous pieces of bytes. Their sizes are known to the
// ranks that send or receive them.
//
// Each call has these steps:
//  1. Every rank publishes its card: a hash of the properties on which the ranks must agree, and sizes. Small inputs
//     are handed over before, so that they are available together with the cards.
//  2. `opened` checks the cards of all ranks. It throws on all ranks or on none.
//  3. The elements are transferred. A failure from here on fails the group.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/dtype.hpp"
#include "muster/group.hpp"
#include "muster/tensor.hpp"
#include "src/base/function_ref.hpp"
#include "src/group/group.hpp"
#include "src/merge/layout.hpp"

namespace muster::collectives {

/// The position of an input in the shared memory of its rank.
struct InputPlace {
  std::uint64_t arena = 0;  // 0 if the input is not in an arena
  std::uint64_t offset = 0;
};
/// An offer of rank 0's memory for a result that all ranks share.
struct ResultOffer {
  std::uint64_t place = 0;
  std::uint64_t first_stamp = 0;
};
/// For calls on devices: the devices, and the value of CallSummary::bytes, which no host backend transfers.
struct OnDevices {
  std::uint64_t devices;
  std::uint64_t bytes;
};
struct HeldResult {
  std::byte* data = nullptr;
  std::shared_ptr<const void> keeper = {};
};

/// The part of a CallSummary that every call has. With a small input, it fits into one cache line.
struct CallHead {
  std::uint64_t agreed = 0;     // the same on all ranks
  std::uint64_t bytes = 0;      // of this rank's input
  std::uint64_t largest = 0;    // the size of the largest piece that it sends to one rank
  std::int64_t extent = 0;      // for all_gather, if the extents need not be equal
  std::uint8_t status = 0;      // 0 if the arguments of this rank are valid
  std::uint8_t wants = 1;       // 0 if this rank wants no result of all_reduce or all_gather
  std::uint8_t joined = 0;      // for all_gather: the buffers for the data of all ranks are stored one after another
  std::uint8_t has_places = 0;  // for backends that share memory: CallPlaces are set
  std::uint32_t piece = 0;      // for backends that share memory: the size of the pieces of an all_gather
};
/// For backends that share memory, and for devices.
struct CallPlaces {
  InputPlace input = {};
  union {
    ResultOffer result = {};
    OnDevices on_devices;
  };
};
struct CallSummary : CallHead, CallPlaces {};
/// Called with the cards of all ranks.
using Opened = FunctionRef<void(std::span<const CallSummary>)>;

using Bytes = std::span<const std::byte>;
using Room = std::span<std::byte>;

class Backend {
 public:
  virtual ~Backend() = default;
  Backend& operator=(Backend&&) = delete;
  [[nodiscard]] virtual std::string_view name() const noexcept = 0;

  /// Reduces the inputs of all ranks, which have the same size. `out` is set on ranks that want the result, and may be
  /// `in`.
  virtual void all_reduce(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                          Room out, const WaitOptions& options) = 0;
  /// Reduces like all_reduce. This rank receives bytes [bounds[rank], bounds[rank + 1]) of the result.
  virtual void reduce_scatter(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype,
                              Bytes in, std::span<const std::uint64_t> bounds, Room out,
                              const WaitOptions& options) = 0;
  /// Sends the input of each rank to all ranks that want it. When `opened` has returned, `outs` contains a buffer for
  /// each rank. If a rank's own buffer is its input, it is not copied; other buffers must not overlap.
  virtual void all_gather(const CallSummary& card, const Opened& opened, Bytes in, std::span<const Room> outs,
                          const WaitOptions& options) = 0;
  /// Return one result that all ranks share if they share memory; it is read-only, and each rank holds it. Otherwise
  /// each rank has its own result. The inputs of all_gather_shared have the same size on all `ranks` ranks.
  virtual HeldResult all_reduce_shared(const CallSummary& card, const Opened& opened, merge::Combine combine,
                                       DType dtype, Bytes in, const WaitOptions& options);
  virtual HeldResult all_gather_shared(const CallSummary& card, const Opened& opened, Bytes in, std::size_t ranks,
                                       const WaitOptions& options);
  /// Sends ins[p] to rank p, which receives it in outs[this rank]; the sizes are equal.
  virtual void all_to_all(const CallSummary& card, const Opened& opened, std::span<const Bytes> ins,
                          std::span<const Room> outs, const WaitOptions& options) = 0;
};

/// Makes a backend that uses the messages of a group of any kind. Local.
std::unique_ptr<Backend> message_backend(group::BaseGroup& group);

/// The maximum number of ranks per host, which is limited by the size of the chunks of shared memory.
inline constexpr int most_ranks_on_host = 2048;
/// Throws Error(unsupported) if a host has more ranks. All ranks get the same result. Local.
void check_ranks_on_hosts(const group::BaseGroup& group);

/// Makes a backend with rings in shared memory. Collective. Returns null on all ranks if some ranks do not share
/// memory. Throws as Group::all_gather, and Error(out_of_space) on all ranks.
std::unique_ptr<Backend> shared_backend(group::BaseGroup& group, const WaitOptions& options);

/// Makes a backend for several hosts, of which at least one has two or more ranks: rings within hosts, messages between
/// them. Collective. Returns null on all ranks if it is not possible or has no advantage. Throws as shared_backend().
std::unique_ptr<Backend> hosts_backend(group::BaseGroup& group, const WaitOptions& options);

// The distribution of bytes among ranks.

/// Returns the beginning of slice `at` of `count`. The slices consist of whole cache lines and are as even as possible.
inline std::uint64_t slice_begin(std::uint64_t bytes, std::size_t count, std::size_t at) noexcept {
  constexpr std::uint64_t cache_line = 64;
  const std::uint64_t lines = (bytes + count * cache_line - 1) / (count * cache_line);
  return std::min(bytes, at * lines * cache_line);
}

/// Returns the beginnings of all slices, and the end of the last one.
inline std::vector<std::uint64_t> even_slices(std::uint64_t bytes, std::size_t count) {
  std::vector<std::uint64_t> bounds(count + 1);
  for (std::size_t at = 0; at <= count; ++at) bounds[at] = slice_begin(bytes, count, at);
  return bounds;
}

// DeviceBackend: transfers the elements of collectives on devices, and allocates memory there. libmuster-cuda
// implements it, and registers it when it is loaded. This library does not depend on CUDA.
//
// A call has the steps of Backend, with the same round on the CPU. The transfers are put into a stream of the device,
// and the call returns before they complete. Bytes and Room are addresses on the device, which the CPU does not access.

/// The devices of the tensors of a rank's call.
struct CallDevices {
  std::uint64_t devices = 0;  ///< identifies the devices by a number that is the same on every host
  // The next two are the same on all ranks.
  std::uint32_t count = 0;   ///< the number of devices; 0 for host memory
  bool is_captured = false;  ///< the call becomes part of a graph

  /// Returns a hash of the values that are the same on all ranks.
  [[nodiscard]] std::uint64_t hash() const noexcept { return 2 * std::uint64_t{count} + (is_captured ? 1 : 0); }
  /// Returns the text that messages add to a call: " on a device".
  [[nodiscard]] std::string words() const;
};

/// Returns the devices of a tensor in the form that Engine expects: empty for host memory.
inline std::span<const Device> devices_of(const TensorView& tensor) noexcept {
  return tensor.device().is_host() ? std::span<const Device>() : std::span(&tensor.device(), 1);
}

class DeviceBackend : public Backend {
 public:
  /// Begins a call of this rank with one tensor on each of these devices. Local. Throws Error(invalid_argument |
  /// unsupported | io), as all functions of this class do.
  virtual CallDevices begin(std::span<const Device> devices) = 0;

  // The next functions refer to the current call and its device.

  /// Returns the bytes of a contiguous tensor.
  [[nodiscard]] virtual Bytes bytes_of(const TensorView& tensor) const = 0;
  virtual void check_reducible(merge::Combine combine, DType dtype) const = 0;
  /// Throws if memory cannot be allocated, which is the case in a graph.
  virtual void check_can_allocate() const = 0;
  [[nodiscard]] virtual Tensor allocate(DType dtype, Shape shape) = 0;
  /// Copies slices along a dimension, one after another.
  [[nodiscard]] virtual Tensor cut(const TensorView& tensor, std::size_t dim,
                                   std::span<const std::int64_t> extents) = 0;
  /// Joins parts, which are stored one after another and have `rows` rows each. A row of the result consists of the
  /// rows of all parts.
  [[nodiscard]] virtual Tensor join(const Tensor& parts, std::span<const std::uint64_t> sizes, std::uint64_t rows) = 0;

  /// Waits until this rank's devices have completed the work that its calls have put into streams. An error fails the
  /// group.
  virtual void wait(const WaitOptions& options) = 0;
  /// Called when the group has failed: aborts the work in progress, which would never end. The next call connects the
  /// devices again.
  virtual void abort() noexcept = 0;
};

/// `round` is the backend for calls with host memory. Calls on devices use its rounds too.
using MakeDeviceBackend = std::unique_ptr<DeviceBackend> (*)(group::BaseGroup& group, Backend& round);
void set_device_backend(MakeDeviceBackend make) noexcept;
/// Returns whether a library of this program has registered a device backend.
[[nodiscard]] bool has_device_backend() noexcept;
/// Throws Error(unsupported) if no device backend is registered.
std::unique_ptr<DeviceBackend> device_backend(group::BaseGroup& group, Backend& round);

}  // namespace muster::collectives
