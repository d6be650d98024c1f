// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/backend.hpp"

#include <fmt/core.h>

#include <atomic>
#include <map>
#include <vector>

#include "muster/error.hpp"
#include "muster/tensor.hpp"

namespace muster::collectives {
namespace {

/// Memory for a result that only this rank uses.
struct OwnResult {
  explicit OwnResult(std::uint64_t bytes) {
    const Tensor memory = Tensor::allocate(DType::u8, {static_cast<std::int64_t>(bytes)});
    held = {bytes == 0 ? nullptr : memory.mutable_data(), memory.owner()};
    room = {held.data, bytes};
  }
  HeldResult held;
  Room room;
};

std::atomic<MakeDeviceBackend> make_device_backend{nullptr};

}  // namespace

HeldResult Backend::all_reduce_shared(const CallSummary& card, const Opened& opened, merge::Combine combine,
                                      DType dtype, Bytes in, const WaitOptions& options) {
  const OwnResult own(in.size());
  all_reduce(card, opened, combine, dtype, in, own.room, options);
  return own.held;
}

HeldResult Backend::all_gather_shared(const CallSummary& card, const Opened& opened, Bytes in, std::size_t ranks,
                                      const WaitOptions& options) {
  const OwnResult own(in.size() * ranks);
  std::vector<Room> outs(ranks);
  for (std::size_t rank = 0; rank < ranks && !in.empty(); ++rank)
    outs[rank] = own.room.subspan(rank * in.size(), in.size());
  all_gather(card, opened, in, outs, options);
  return own.held;
}

std::string CallDevices::words() const {
  if (count == 0) return {};
  std::string text = count == 1 ? " on a device" : fmt::format(" on {} devices of each rank", count);
  return is_captured ? text + ", captured into a graph" : text;
}

void set_device_backend(MakeDeviceBackend make) noexcept {
  make_device_backend = make;
}

bool has_device_backend() noexcept {
  return make_device_backend.load() != nullptr;
}

void check_ranks_on_hosts(const group::BaseGroup& group) {
  std::map<int, int> ranks;  // by host
  for (const int rank : group.all())
    if (++ranks[group.host_of(rank)] > most_ranks_on_host)
      throw Error(ErrorKind::unsupported, fmt::format("collectives: the host of rank {} has more than {} ranks of this "
                                                      "group. Use more hosts, or split the group",
                                                      group.info(rank).global_rank, most_ranks_on_host));
}

std::unique_ptr<DeviceBackend> device_backend(group::BaseGroup& group, Backend& round) {
  const MakeDeviceBackend make = make_device_backend;
  if (make == nullptr)
    throw Error(ErrorKind::unsupported,
                "collectives on devices need libmuster-cuda. Link the program with it (pkg-config muster-cuda), or "
                "copy the tensors to the host first");
  return make(group, round);
}

}  // namespace muster::collectives
