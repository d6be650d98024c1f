// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/backend.hpp"

#include <vector>

#include "muster/tensor.hpp"

namespace muster::collectives {
namespace {

/// A result of this rank's own.
struct Own {
  explicit Own(std::uint64_t bytes) {
    const Tensor memory = Tensor::allocate(DType::u8, {static_cast<std::int64_t>(bytes)});
    held = {bytes == 0 ? nullptr : memory.mutable_data(), memory.owner()};
    room = {held.data, bytes};
  }
  HeldResult held;
  Room room;
};

}  // namespace

HeldResult Backend::all_reduce_shared(const Card& card, const Opened& opened, merge::Combine combine, DType dtype,
                                      Bytes in, const WaitOptions& options) {
  const Own own(in.size());
  all_reduce(card, opened, combine, dtype, in, own.room, options);
  return own.held;
}

HeldResult Backend::all_gather_shared(const Card& card, const Opened& opened, Bytes in, std::size_t ranks,
                                      const WaitOptions& options) {
  const Own own(in.size() * ranks);
  std::vector<Room> outs(ranks);
  for (std::size_t rank = 0; rank < ranks && !in.empty(); ++rank)
    outs[rank] = own.room.subspan(rank * in.size(), in.size());
  all_gather(card, opened, in, outs, options);
  return own.held;
}

}  // namespace muster::collectives
