// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/packed_config.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "muster/error.hpp"
#include "src/core/descriptor.hpp"

namespace muster::collectives {
// A Config as bytes: the length of its descriptor, the descriptor, then its tensors where SlotLayout puts them, from
// the next place that is aligned.

namespace {

std::uint64_t tensors_begin(std::uint64_t descriptor) {
  core::SlotLayout layout;
  (void)layout.place(sizeof(std::uint64_t) + descriptor);
  return layout.place(0);
}

}  // namespace

Tensor packed(const Config& config) {
  std::vector<Tensor> tensors;
  core::SlotLayout layout;
  std::vector<std::uint64_t> places;
  const std::vector<std::byte> descriptor =
      core::encode_descriptor(config, [&](const Tensor& tensor) -> std::optional<core::Place> {
        (void)tensor.view().host_data();
        tensors.push_back(tensor);
        places.push_back(layout.place(tensor.nbytes()));
        return std::nullopt;
      });
  const std::uint64_t begin = tensors_begin(descriptor.size());
  const Tensor bytes = Tensor::allocate(DType::u8, {static_cast<std::int64_t>(begin + layout.size())});
  std::byte* const data = bytes.mutable_data();
  const std::uint64_t length = descriptor.size();
  std::memset(data, 0, begin);
  std::memcpy(data, &length, sizeof length);
  std::ranges::copy(descriptor, data + sizeof length);
  for (std::size_t i = 0; i < tensors.size(); ++i) copy_contiguous(tensors[i].view(), data + begin + places[i]);
  return bytes;
}

Config unpacked(const Tensor& all, std::uint64_t offset, std::uint64_t bytes) {
  const auto torn = [] { return Error(ErrorKind::corrupt, "a Config that another rank sent is cut off"); };
  const std::span<const std::byte> message = all.bytes().subspan(offset, bytes);
  std::uint64_t length = 0;
  if (message.size() < sizeof length) throw torn();
  std::memcpy(&length, message.data(), sizeof length);
  if (length > message.size() - sizeof length || tensors_begin(length) > message.size()) throw torn();
  const std::span<const std::byte> tensors = message.subspan(tensors_begin(length));
  return core::decode_descriptor(message.subspan(sizeof length, length), [&](DType dtype, const Shape& shape,
                                                                             std::uint64_t nbytes, core::Place place) {
    if (place.segment != 0 || place.offset > tensors.size() || nbytes > tensors.size() - place.offset) throw torn();
    std::byte* const data = all.mutable_data() + (tensors.data() - all.data()) + place.offset;
    return Tensor(TensorView(dtype, shape, data), all.owner(), data);
  });
}

}  // namespace muster::collectives
