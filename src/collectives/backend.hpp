// SPDX-License-Identifier: Apache-2.0
#pragma once
// Backend: what moves the elements of collectives. It knows bytes: contiguous pieces, whose sizes are known to whoever
// gives or gets them.
//
// Each call:
//  1. Every rank tells its card: a hash of what the ranks have to agree about, and sizes. What is small is handed over
//     before, so that it is there when the cards are.
//  2. `opened` looks at all cards, which every rank has, and throws on all ranks or on none.
//  3. The elements move. What fails from here on is the failure of the group.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/dtype.hpp"
#include "muster/sync_group.hpp"
#include "muster/tensor.hpp"
#include "src/base/function_ref.hpp"
#include "src/merge/layout.hpp"
#include "src/sync/group.hpp"

namespace muster::collectives {

/// Where an input lies in its rank's shared memory.
struct InputPlace {
  std::uint64_t arena = 0;  // 0: nowhere
  std::uint64_t offset = 0;
};
/// Memory of rank 0 for a result of all.
struct ResultOffer {
  std::uint64_t place = 0;
  std::uint64_t first_stamp = 0;
};
/// Of calls on devices: which, and Card::bytes, which no backend of the host moves.
struct OnDevices {
  std::uint64_t devices;
  std::uint64_t bytes;
};
struct HeldResult {
  std::byte* data = nullptr;
  std::shared_ptr<const void> keeper = {};
};

struct Card {
  std::uint64_t agreed = 0;   // the same on all ranks
  std::uint64_t bytes = 0;    // of what this rank gives
  std::uint64_t largest = 0;  // the largest piece that it gives to one rank
  std::int64_t extent = 0;    // of all_gather, where it is not agreed
  std::uint16_t status = 0;   // 0: this rank's arguments can be
  std::uint16_t wants = 1;    // 0: all_reduce and all_gather have nothing for this rank
  std::uint16_t joined = 0;   // of all_gather: the rooms for all ranks' bytes lie one behind the other
  // Of backends that share memory. The fewer bytes a card has, the sooner it comes.
  InputPlace input = {};
  union {
    ResultOffer result = {};
    OnDevices on_devices;
  };
};
/// Called with all cards.
using Opened = FunctionRef<void(std::span<const Card>)>;

using Bytes = std::span<const std::byte>;
using Room = std::span<std::byte>;

class Backend {
 public:
  virtual ~Backend() = default;
  Backend& operator=(Backend&&) = delete;
  [[nodiscard]] virtual std::string_view name() const noexcept = 0;

  /// Each rank's `in`, of the same size, reduced, on ranks that want it. `out` may be `in`.
  virtual void all_reduce(const Card& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                          Room out, const WaitOptions& options) = 0;
  /// Likewise; of the result, this rank gets [bounds[rank], bounds[rank + 1]), in bytes.
  virtual void reduce_scatter(const Card& card, const Opened& opened, merge::Combine combine, DType dtype, Bytes in,
                              std::span<const std::uint64_t> bounds, Room out, const WaitOptions& options) = 0;
  /// Each rank's `in` comes to all ranks that want it: `outs` has room for each rank's when `opened` has returned.
  /// Where a rank's own room is what it gives, nothing is copied; nothing else may overlap.
  virtual void all_gather(const Card& card, const Opened& opened, Bytes in, std::span<const Room> outs,
                          const WaitOptions& options) = 0;
  /// The same, with one result for all ranks if they share memory: each holds it, and reads it only; else each has its
  /// own. `in` of all_gather has the same size on all of so many ranks.
  virtual HeldResult all_reduce_shared(const Card& card, const Opened& opened, merge::Combine combine, DType dtype,
                                       Bytes in, const WaitOptions& options);
  virtual HeldResult all_gather_shared(const Card& card, const Opened& opened, Bytes in, std::size_t ranks,
                                       const WaitOptions& options);
  /// ins[p] comes to rank p's outs[this rank], which is as large.
  virtual void all_to_all(const Card& card, const Opened& opened, std::span<const Bytes> ins,
                          std::span<const Room> outs, const WaitOptions& options) = 0;
};

/// The messages of a group of any kind. Local.
std::unique_ptr<Backend> message_backend(sync::Group& group);

/// The chunks of shared memory have room for so many ranks of one host.
inline constexpr int most_ranks_on_host = 2048;
/// Throws Error(unsupported) if a host has more. The same on all ranks. Local.
void check_ranks_on_hosts(const sync::Group& group);

/// Rings in the ranks' shared memory. Collective; null on all ranks if some do not share it. Throws as
/// SyncGroup::all_gather, and Error(no_space) on all ranks.
std::unique_ptr<Backend> shared_backend(sync::Group& group, const WaitOptions& options);

/// Between hosts, one of which has two ranks or more: rings inside, messages across. Collective; null on all ranks if
/// it cannot be, or there is nothing to gain. Throws as shared_backend().
std::unique_ptr<Backend> hosts_backend(sync::Group& group, const WaitOptions& options);

// How bytes are shared out among ranks.

/// Where slice `at` of `count` begins, of bytes that are cut into slices of whole cache lines, as even as that allows.
inline std::uint64_t slice_begin(std::uint64_t bytes, std::size_t count, std::size_t at) noexcept {
  constexpr std::uint64_t cache_line = 64;
  const std::uint64_t lines = (bytes + count * cache_line - 1) / (count * cache_line);
  return std::min(bytes, at * lines * cache_line);
}

/// The begins of all slices, and the end.
inline std::vector<std::uint64_t> even_slices(std::uint64_t bytes, std::size_t count) {
  std::vector<std::uint64_t> bounds(count + 1);
  for (std::size_t at = 0; at <= count; ++at) bounds[at] = slice_begin(bytes, count, at);
  return bounds;
}

// DeviceBackend: what moves the elements of collectives that are on devices, and takes memory there. libmuster-cuda has
// one, and registers it when it is loaded: this library knows nothing of CUDA.
//
// A call is the one of Backend, with the same round on the CPU. What moves is put into a stream of the device, and the
// call returns before it has. Bytes and Room are addresses on the device: the CPU does not look there.

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
