// SPDX-License-Identifier: Apache-2.0
// A sender's side of the MPI route.

#include <algorithm>
#include <cstring>

#include "src/mpi/mpi_parcel.hpp"
#include "src/mpi/mpi_route.hpp"
#include "src/sync/failing.hpp"

namespace muster::mpi {

MpiSending::MpiSending(const gather::Call& call, MpiGroup& group)
    : call_(call), group_(group), pool_(buffer_pool_of(group)), flow_(group, call.first()) {}

void MpiSending::offer(gather::Record& record) {
  tree_ = OutgoingTree(*call_.value, record);
}

void MpiSending::move(ExchangeReport& report) {
  for (const Placed& place : tree_.places()) report.mpi_bytes += place.bytes;
  try {
    prepare();
    send_descriptor(true);
  } catch (...) {
    // What the group failed with, all ranks know.
    if (!group_.failure()) send_descriptor(false);
    throw;
  }
  if (tree_.bytes() <= rides_along) return;
  const std::vector<std::byte> word =
      group_.receive(call_.first(), 1, call_.wait("gather: sending"), Subject::exchange);
  if (word.size() == 1 && word.front() != std::byte{0}) sync::or_fail(group_, [&] { send_pieces(); });
}

void MpiSending::prepare() {
  if (call_.stage) {
    call_.stage();
    gather::Record same;
    tree_ = OutgoingTree(*call_.value, same);
  }
  if (tree_.bytes() <= rides_along) return;
  pieces_ = cut(tree_.places());
  std::size_t packed = 0;
  std::uint64_t largest = packed_piece;
  for (const Piece& piece : pieces_) {
    if (!tree_.is_packed(piece)) continue;
    ++packed;
    if (piece.bytes > largest) largest = cut_piece;
  }
  flow_.prepare(*pool_, packed, largest, call_.options->pool_limit);
}

void MpiSending::send_descriptor(bool is_well) {
  const ParcelHead head{call_.number, is_well ? 1U : 0U, 0};
  const bool rides = is_well && tree_.bytes() <= rides_along;
  const std::span<const std::byte> body = is_well ? tree_.descriptor() : std::span<const std::byte>();
  std::vector<std::byte> message(sizeof head + body.size() + (rides ? tree_.bytes() : 0));
  std::memcpy(message.data(), &head, sizeof head);
  if (!body.empty()) std::memcpy(message.data() + sizeof head, body.data(), body.size());
  if (rides) tree_.copy(message.data() + sizeof head + body.size());
  group_.send(call_.first(), message, call_.wait("gather: sending"), Subject::exchange);
}

void MpiSending::send_pieces() {
  const WaitOptions wait = call_.wait("gather: sending");
  for (const Piece& piece : pieces_) {
    if (tree_.is_packed(piece)) {
      const std::shared_ptr<std::byte> buffer = flow_.buffer(wait);
      tree_.pack(piece, buffer.get());
      flow_.send({buffer.get(), piece.bytes}, buffer, wait);
    } else {
      flow_.send(tree_.bytes_of(piece), tree_.owner_of(piece), wait);
    }
  }
  flow_.finish(wait);
}

}  // namespace muster::mpi
