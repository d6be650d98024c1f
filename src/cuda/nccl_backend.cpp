// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/nccl_backend.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "muster/error.hpp"
#include "src/collectives/arguments.hpp"
#include "src/cuda/device_state.hpp"
#include "src/merge/reduce.hpp"

namespace muster::cuda {
namespace {

constexpr std::array<std::pair<DType, NcclType>, 10> nccl_types = {{{DType::i8, NcclType::i8},
                                                                    {DType::u8, NcclType::u8},
                                                                    {DType::i32, NcclType::i32},
                                                                    {DType::u32, NcclType::u32},
                                                                    {DType::i64, NcclType::i64},
                                                                    {DType::u64, NcclType::u64},
                                                                    {DType::f16, NcclType::f16},
                                                                    {DType::bf16, NcclType::bf16},
                                                                    {DType::f32, NcclType::f32},
                                                                    {DType::f64, NcclType::f64}}};

std::optional<NcclType> nccl_type(DType dtype) {
  const auto found = std::ranges::find(nccl_types, dtype, &std::pair<DType, NcclType>::first);
  return found == nccl_types.end() ? std::nullopt : std::optional(found->second);
}

NcclOp nccl_op(merge::Combine combine) {
  if (combine == merge::Combine::copy) throw Error(ErrorKind::invalid_argument, "NCCL: unsupported reduction");
  // In the order of merge::Combine.
  constexpr std::array<NcclOp, 5> all = {NcclOp::max, NcclOp::sum, NcclOp::min, NcclOp::product, NcclOp::average};
  return all.at(static_cast<std::size_t>(combine) - 1);
}

DevicePointer pointer_to(Bytes bytes) {
  return device_pointer(bytes.data());
}

/// Copies rows of `width` bytes on a device. Source and target have their own pitch.
void copy_rows(DevicePointer to, std::uint64_t to_pitch, DevicePointer from, std::uint64_t from_pitch,
               std::uint64_t width, std::uint64_t rows, int device, StreamHandle stream) {
  if (width == 0) return;
  constexpr const char* attempted = "rearranging a tensor on a device";
  const Current current(device);
  if (std::max(to_pitch, from_pitch) > device_max_pitch_bytes(device)) {
    for (std::uint64_t row = 0; row < rows; ++row)
      check(driver().copy_on_device(to + row * to_pitch, from + row * from_pitch, width, stream), attempted);
    return;
  }
  Copy2d copy{};
  copy.source_type = copy.target_type = memory_device;
  copy.source_device = from;
  copy.source_pitch = from_pitch;
  copy.target_device = to;
  copy.target_pitch = to_pitch;
  copy.width = width;
  copy.height = rows;
  check(driver().copy_2d(&copy, stream), attempted);
}

}  // namespace

NcclReduction nccl_reduction(merge::Combine combine, DType dtype) {
  const std::optional<NcclType> type = nccl_type(dtype);
  if (!type)
    throw Error(ErrorKind::unsupported,
                fmt::format("NCCL has no {} for {}. Copy the tensor to the host first (copy_to_host)",
                            merge::name_of(combine), to_string(dtype)));
  return {*type, nccl_op(combine), itemsize(dtype)};
}

Bytes NcclBackend::bytes_of(const TensorView& tensor) const {
  (void)calls_.lane_of(tensor.device());
  if (tensor.nbytes() == 0) return {};
  if (!tensor.is_contiguous())
    throw Error(ErrorKind::invalid_argument,
                fmt::format("a strided tensor of shape {} is on {}. Make it contiguous first",
                            to_string(tensor.shape()), to_string(tensor.device())));
  (void)locate(tensor);
  return {tensor.data(), tensor.nbytes()};
}

void NcclBackend::check_can_allocate() const {
  if (calls_.is_captured())
    throw Error(ErrorKind::invalid_argument,
                "NCCL: allocating memory: the named stream is being captured into a graph. Pass the result "
                "(all_gather_into, reduce_scatter_into, ...), and join and cut along dimension 0");
}

Tensor NcclBackend::allocate(DType dtype, Shape shape) {
  check_can_allocate();
  const NcclCalls::DeviceCall& lane = calls_.lanes().front();
  const Device device{Device::Kind::cuda, lane.device};
  const std::uint64_t bytes = byte_size(dtype, shape);
  if (bytes == 0) return {TensorView(dtype, std::move(shape), nullptr, {}, device), nullptr, nullptr};
  const Current current(lane.device);
  const MemoryPool::Buffer buffer = device_state_of(group_)->memory_of(lane.device).take(bytes);
  // An earlier call may still be about to write to this memory: the memory of an earlier result, or of a rearranged
  // tensor.
  calls_.follow(lane);
  std::byte* const data = buffer.data.get();
  return {TensorView(dtype, std::move(shape), data, {}, device), buffer.data, data};
}

Tensor NcclBackend::cut(const TensorView& tensor, std::size_t dim, std::span<const std::int64_t> extents) {
  const DevicePointer from = pointer_to(bytes_of(tensor));
  Tensor slices = allocate(tensor.dtype(), tensor.shape());
  if (tensor.nbytes() == 0) return slices;
  const NcclCalls::DeviceCall& lane = calls_.lane_of(tensor.device());
  const std::uint64_t rows = collectives::rows_before(tensor.shape(), dim);
  const std::uint64_t pitch = tensor.nbytes() / rows;
  const std::uint64_t unit = pitch / static_cast<std::uint64_t>(tensor.shape()[dim]);
  std::uint64_t at = 0;
  for (const std::int64_t extent : extents) {
    const std::uint64_t width = static_cast<std::uint64_t>(extent) * unit;
    copy_rows(device_pointer(slices.data()) + at * rows, width, from + at, pitch, width, rows, lane.device,
              lane.stream);
    at += width;
  }
  calls_.note_last(lane);
  return slices;
}

Tensor NcclBackend::join(const Tensor& parts, std::span<const std::uint64_t> sizes, std::uint64_t rows) {
  Tensor whole = allocate(parts.dtype(), parts.shape());
  const NcclCalls::DeviceCall& lane = calls_.lane_of(parts.device());
  const std::uint64_t pitch = parts.nbytes() / rows;
  std::uint64_t at = 0;
  for (const std::uint64_t size : sizes) {
    const std::uint64_t width = size / rows;
    copy_rows(device_pointer(whole.data()) + at, pitch, device_pointer(parts.data()) + at * rows, width, width, rows,
              lane.device, lane.stream);
    at += width;
  }
  calls_.note_last(lane);
  return whole;
}

void NcclBackend::all_reduce(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype,
                             Bytes in, Room out, const WaitOptions& options) {
  calls_.open(card, opened, options);
  const std::span<const CallSummary> cards = calls_.cards();
  const NcclReduction what = nccl_reduction(combine, dtype);
  const auto wants = [](const CallSummary& each) { return each.wants != 0; };
  const auto root = std::ranges::find_if(cards, wants);
  const bool all_want = std::ranges::all_of(cards, wants);
  calls_.put(options, [&](std::size_t, Communicator& communicator, StreamHandle stream) {
    if (in.empty()) return;
    if (all_want)
      communicator.all_reduce(pointer_to(in), pointer_to(out), in.size(), what, stream);
    else
      communicator.reduce(pointer_to(in), pointer_to(out), in.size(), what, static_cast<int>(root - cards.begin()),
                          stream);
  });
}

void NcclBackend::reduce_scatter(const CallSummary& card, const Opened& opened, merge::Combine combine, DType dtype,
                                 Bytes in, std::span<const std::uint64_t> bounds, Room out,
                                 const WaitOptions& options) {
  calls_.open(card, opened, options);
  const std::span<const CallSummary> cards = calls_.cards();
  const NcclReduction what = nccl_reduction(combine, dtype);
  const auto size_of = [&](std::size_t rank) { return bounds[rank + 1] - bounds[rank]; };
  bool is_even = true;
  for (std::size_t rank = 0; rank < cards.size(); ++rank) is_even = is_even && size_of(rank) == size_of(0);
  calls_.put(options, [&](std::size_t, Communicator& communicator, StreamHandle stream) {
    if (in.empty()) return;
    if (is_even) return communicator.reduce_scatter(pointer_to(in), pointer_to(out), size_of(0), what, stream);
    for (std::size_t rank = 0; rank < cards.size(); ++rank)
      if (size_of(rank) != 0)
        communicator.reduce(pointer_to(in) + bounds[rank], rank == self() ? pointer_to(out) : 0, size_of(rank), what,
                            static_cast<int>(rank), stream);
  });
}

void NcclBackend::all_gather(const CallSummary& card, const Opened& opened, Bytes in, std::span<const Room> outs,
                             const WaitOptions& options) {
  calls_.open(card, opened, options);
  const std::span<const CallSummary> cards = calls_.cards();
  const auto is_whole = [&](const CallSummary& each) {
    return each.wants != 0 && each.joined != 0 && each.bytes == cards.front().bytes;
  };
  const bool all_alike = std::ranges::all_of(cards, is_whole);
  // If all other ranks want the elements of a rank, they are sent by a broadcast.
  const auto all_want_of = [&](std::size_t giver) {
    for (std::size_t rank = 0; rank < cards.size(); ++rank)
      if (rank != giver && cards[rank].wants == 0) return false;
    return true;
  };
  const auto add = [&](std::size_t, Communicator& communicator, StreamHandle stream) {
    if (all_alike) {
      if (!in.empty()) communicator.all_gather(pointer_to(in), pointer_to(outs.front()), in.size(), stream);
      return;
    }
    for (std::size_t giver = 0; giver < cards.size(); ++giver) {
      const std::uint64_t bytes = cards[giver].bytes;
      const bool is_mine = giver == self();
      if (bytes == 0) continue;
      if (all_want_of(giver)) {
        const DevicePointer out = outs[giver].empty() ? pointer_to(in) : pointer_to(outs[giver]);
        communicator.broadcast(is_mine ? pointer_to(in) : out, out, bytes, static_cast<int>(giver), stream);
        continue;
      }
      const bool is_there = is_mine && outs[giver].data() == in.data();
      for (std::size_t rank = 0; is_mine && rank < cards.size(); ++rank)
        if (cards[rank].wants != 0 && !(rank == giver && is_there))
          communicator.send(pointer_to(in), bytes, static_cast<int>(rank), stream);
      if (card.wants != 0 && !is_there)
        communicator.receive(pointer_to(outs[giver]), bytes, static_cast<int>(giver), stream);
    }
  };
  calls_.put(options, add);
}

void NcclBackend::all_to_all(const CallSummary& card, const Opened& opened, std::span<const Bytes> ins,
                             std::span<const Room> outs, const WaitOptions& options) {
  calls_.open(card, opened, options);
  const std::span<const CallSummary> cards = calls_.cards();
  calls_.put(options, [&](std::size_t, Communicator& communicator, StreamHandle stream) {
    for (std::size_t rank = 0; rank < cards.size(); ++rank) {
      if (rank == self() && ins[rank].data() == outs[rank].data()) continue;
      const auto other = static_cast<int>(rank);
      if (!ins[rank].empty()) communicator.send(pointer_to(ins[rank]), ins[rank].size(), other, stream);
      if (!outs[rank].empty()) communicator.receive(pointer_to(outs[rank]), outs[rank].size(), other, stream);
    }
  });
}

namespace {

const bool is_backend_registered = [] {
  collectives::set_device_backend([](group::BaseGroup& group, collectives::Backend& round) {
    return std::unique_ptr<collectives::DeviceBackend>(std::make_unique<NcclBackend>(group, round));
  });
  return true;
}();

}  // namespace
}  // namespace muster::cuda
