// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/packed_config.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "muster/error.hpp"
#include "src/core/descriptor.hpp"

namespace muster::collectives {
namespace {

/// The format in one piece: the length of the descriptor, the descriptor, then the tensors from the next aligned
/// position.
std::uint64_t tensors_begin(std::uint64_t descriptor) {
  core::SlotLayout layout;
  (void)layout.place(sizeof(std::uint64_t) + descriptor);
  return layout.place(0);
}

Error torn() {
  return {ErrorKind::corrupt, "malformed message: a config of another rank is truncated"};
}

Tensor bytes_of(std::uint64_t count) {
  return Tensor::allocate(DType::u8, {static_cast<std::int64_t>(count)});
}

/// Decodes a Config whose tensors are the `bytes` bytes of `all` from `begin` on.
Config decoded(std::span<const std::byte> descriptor, const Tensor& all, std::uint64_t begin, std::uint64_t bytes) {
  return core::decode_descriptor(
      descriptor, [&](DType dtype, const Shape& shape, std::uint64_t nbytes, core::TensorLocation place) {
        if (place.segment != 0 || place.offset > bytes || nbytes > bytes - place.offset) throw torn();
        const std::byte* const data = nbytes == 0 ? nullptr : all.data() + begin + place.offset;
        return Tensor(TensorView(dtype, shape, data), all.owner(),
                      all.is_writable() ? const_cast<std::byte*>(data) : nullptr);
      });
}

}  // namespace

ConfigPlan::ConfigPlan(const Config& config) {
  core::SlotLayout layout;
  descriptor = core::encode_descriptor(config, [&](const Tensor& tensor) -> std::optional<core::TensorLocation> {
    (void)tensor.view().host_data();
    tensors.push_back(tensor);
    places.push_back(layout.place(tensor.nbytes()));
    return std::nullopt;
  });
  bytes = layout.size();
}

void ConfigPlan::copy_tensors_to(std::byte* target) const {
  for (std::size_t i = 0; i < tensors.size(); ++i) copy_contiguous(tensors[i].view(), target + places[i]);
}

std::uint64_t ConfigPlan::whole_bytes() const {
  return tensors_begin(descriptor.size()) + bytes;
}

void ConfigPlan::copy_whole_to(std::byte* target) const {
  const std::uint64_t begin = tensors_begin(descriptor.size());
  const std::uint64_t length = descriptor.size();
  std::memset(target, 0, begin);
  std::memcpy(target, &length, sizeof length);
  std::ranges::copy(descriptor, target + sizeof length);
  copy_tensors_to(target + begin);
}

PackedConfig packed(const Config& config) {
  ConfigPlan plan(config);
  PackedConfig packed{std::move(plan.descriptor), {}};
  if (plan.tensors.size() == 1 && plan.tensors[0].view().is_contiguous() && plan.bytes == plan.tensors[0].nbytes()) {
    packed.tensors = plan.tensors[0];
    return packed;
  }
  packed.tensors = bytes_of(plan.bytes);
  if (plan.bytes != 0) plan.copy_tensors_to(packed.tensors.mutable_data());
  return packed;
}

Config unpacked(std::span<const std::byte> descriptor, const Tensor& tensors) {
  return decoded(descriptor, tensors, 0, tensors.nbytes());
}

std::optional<TensorSpec> tensor_of(std::span<const std::byte> descriptor) {
  TensorSpec spec;
  const Config config =
      core::decode_descriptor(descriptor, [&](DType dtype, const Shape& shape, std::uint64_t, core::TensorLocation) {
        spec = {dtype, shape};
        return Tensor();
      });
  return config.is_tensor() ? std::optional(std::move(spec)) : std::nullopt;
}

Tensor packed_whole(const ConfigPlan& plan) {
  Tensor bytes = bytes_of(plan.whole_bytes());
  plan.copy_whole_to(bytes.mutable_data());
  return bytes;
}

Config unpacked_whole(const Tensor& all, std::uint64_t offset, std::uint64_t bytes) {
  const std::span<const std::byte> message = all.bytes().subspan(offset, bytes);
  std::uint64_t length = 0;
  if (message.size() < sizeof length) throw torn();
  std::memcpy(&length, message.data(), sizeof length);
  if (length > message.size() - sizeof length || tensors_begin(length) > message.size()) throw torn();
  const std::uint64_t begin = tensors_begin(length);
  return decoded(message.subspan(sizeof length, length), all, offset + begin, bytes - begin);
}

}  // namespace muster::collectives
