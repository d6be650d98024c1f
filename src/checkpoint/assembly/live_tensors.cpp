// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/assembly/live_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/core/thread_pool.hpp"
#include "src/gather/route.hpp"
#include "src/group/group.hpp"
#include "src/merge/boxes.hpp"

namespace muster {
namespace {

// Bytes of a tensor on a GPU that are copied in one step.
constexpr std::uint64_t staged_at_once = 32 << 20;

[[noreturn]] void refuse_part(const TensorPart& part, const std::string& words) {
  throw Error(ErrorKind::invalid_argument, fmt::format("tensor {}: {}", in_quotes(part.name), words));
}

PartPlace place_of_part(const TensorPart& part) {
  const Shape& shape = part.tensor.shape();
  if (part.whole.empty() && !part.offset.empty() && !shape.empty())
    refuse_part(part, "it has an offset, but no whole shape. Pass both, or neither");
  PartPlace place{part.whole.empty() ? shape : part.whole, part.offset};
  if (place.offset.empty()) place.offset.assign(shape.size(), 0);
  if (!merge::is_inside({place.offset, shape}, place.whole))
    refuse_part(part, fmt::format("its part of shape {} at offset {} is out of range for the whole shape {}",
                                  to_string(shape), to_string(place.offset), to_string(place.whole)));
  return place;
}

/// Returns a view of the bytes [offset, offset + length) of a contiguous tensor.
TensorView bytes_of_view(const TensorView& view, std::uint64_t offset, std::uint64_t length) {
  return {DType::u8, {static_cast<std::int64_t>(length)}, view.data() + offset, {}, view.device()};
}

}  // namespace

LiveTensors::LiveTensors(std::span<const TensorPart> parts, Group& group) : group_(&group) {
  ShardListing listing{.rank = group.rank()};
  for (const TensorPart& part : parts) {
    if (!is_utf8(part.name)) refuse_part(part, "its name is not UTF-8. Pass names in UTF-8");
    if (part.name.empty()) throw Error(ErrorKind::invalid_argument, "a tensor has no name. Give each tensor a name");
    const TensorView& view = part.tensor.view();
    if (!view.device().is_host() && gather::RouteTable::instance().staging() == nullptr)
      throw Error(ErrorKind::unsupported,
                  fmt::format("tensor {}: it is on {}, and this program cannot read GPUs. Link libmuster-cuda, or copy "
                              "the tensor to the host",
                              in_quotes(part.name), to_string(view.device())));
    listing.places.push_back(place_of_part(part));
    listing.tensors.push_back({part.name, {view.dtype(), view.shape()}});
    entries_.push_back({part.name, view.dtype(), view.shape(), 0, view.nbytes()});
    views_.push_back(view);
  }
  listings_.push_back(std::move(listing));
  wait_for_streams();
}

Tensor LiveTensors::copied_to_host(const TensorView& view) const {
  const std::lock_guard lock(copying_);
  const Config on_host = gather::RouteTable::instance().staging()->to_host(Config(Tensor::borrow(view)), *group_,
                                                                           {.phase = "export: copying from a GPU"});
  return on_host.as_tensor();
}

void LiveTensors::wait_for_streams() const {
  std::set<int> waited;
  for (std::size_t i = 0; i < views_.size(); ++i) {
    const Device& device = views_[i].device();
    if (device.is_host() || views_[i].nbytes() == 0 || !waited.insert(device.index).second) continue;
    (void)copied_to_host(bytes_of_view(views_[i], 0, 1));
  }
}

std::span<const std::byte> LiveTensors::memory(std::size_t tensor) const noexcept {
  const TensorView& view = views_[tensor];
  if (!view.device().is_host() || !view.is_contiguous() || view.data() == nullptr) return {};
  return {view.data(), view.nbytes()};
}

void LiveTensors::read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const {
  if (target.empty()) return;
  const TensorView& view = views_[tensor];
  if (!view.device().is_host()) return read_from_device(tensor, offset, target);
  if (view.is_contiguous()) {
    std::memcpy(target.data(), view.data() + offset, target.size());
    return;
  }
  // Strided tensors are not packed, so elements have whole bytes.
  const std::uint64_t item = itemsize(view.dtype());
  const std::uint64_t first = offset / item;
  const std::uint64_t end = (offset + target.size() + item - 1) / item;
  std::vector<std::byte> whole;
  std::byte* to = target.data();
  if (offset % item != 0 || target.size() % item != 0) {
    whole.resize((end - first) * item);
    to = whole.data();
  }
  merge::for_boxes(view.shape(), static_cast<std::int64_t>(first), static_cast<std::int64_t>(end - first),
                   [&](const Shape& begin, const Shape& size) {
                     TensorView box = view;
                     for (std::size_t dim = 0; dim < begin.size(); ++dim)
                       if (size[dim] != box.shape()[dim]) box = box.slice(dim, begin[dim], begin[dim] + size[dim]);
                     copy_contiguous(box, to);
                     to += box.nbytes();
                   });
  if (!whole.empty()) std::memcpy(target.data(), whole.data() + offset % item, target.size());
}

void LiveTensors::read_from_device(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const {
  const TensorView& view = views_[tensor];
  if (!view.is_contiguous()) {
    const Tensor whole = copied_to_host(view);
    std::memcpy(target.data(), whole.bytes().data() + offset, target.size());
    return;
  }
  for (std::uint64_t at = 0; at < target.size(); at += staged_at_once) {
    const std::uint64_t length = std::min(staged_at_once, target.size() - at);
    const Tensor part = copied_to_host(bytes_of_view(view, offset + at, length));
    std::memcpy(target.data() + at, part.bytes().data(), length);
  }
}

ExtraFiles LiveTensors::carried(const std::string& /*carry*/) const {
  return {};
}

ModelFacts LiveTensors::facts(const Request& request, std::vector<std::string>& /*notes*/) const {
  ModelFacts facts{.config = config_of(request)};
  facts.is_own = facts.config.has_value();
  return facts;
}

std::uint64_t LiveTensors::bytes_to_keep(std::span<const std::size_t> tensors) const noexcept {
  std::uint64_t bytes = 0;
  for (const std::size_t tensor : tensors) bytes += (entries_[tensor].bytes + 63) / 64 * 64;
  return bytes;
}

void LiveTensors::keep(std::span<const std::size_t> tensors, std::span<std::byte> memory) {
  constexpr std::uint64_t copied_at_once = 4 << 20;
  struct Piece {
    std::size_t tensor = 0;
    std::uint64_t offset = 0;
    std::byte* to = nullptr;
    std::uint64_t bytes = 0;
  };
  std::vector<TensorView> kept(views_.size());
  std::vector<Piece> pieces;
  std::byte* to = memory.data();
  bool is_on_host = true;
  for (const std::size_t tensor : tensors) {
    const TensorEntry& entry = entries_[tensor];
    kept[tensor] = TensorView(entry.dtype, entry.shape, to);
    // Each copy from a GPU waits once.
    const bool is_here = views_[tensor].device().is_host();
    const std::uint64_t most = is_here ? copied_at_once : views_[tensor].is_contiguous() ? staged_at_once : entry.bytes;
    is_on_host = is_on_host && is_here;
    for (std::uint64_t at = 0; at < entry.bytes; at += most)
      pieces.push_back({tensor, at, to + at, std::min(most, entry.bytes - at)});
    to += bytes_to_keep(std::span(&tensor, 1));
  }
  // Copies from a GPU use the stream of this thread.
  parallel_for(pieces.size(), is_on_host ? copy_workers(group::ranks_of_host(*group_)) : 1,
               [&](std::size_t index, std::size_t) {
                 const Piece& piece = pieces[index];
                 read(piece.tensor, piece.offset, {piece.to, piece.bytes});
               });
  views_ = std::move(kept);
}

}  // namespace muster
