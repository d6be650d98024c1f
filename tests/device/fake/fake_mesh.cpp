// SPDX-License-Identifier: Apache-2.0
#include "tests/device/fake/fake_mesh.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace fake {
namespace {

struct Bf16 {
  std::uint16_t bits;
  explicit Bf16(float value) {
    std::uint32_t wide = 0;
    std::memcpy(&wide, &value, sizeof wide);
    bits = static_cast<std::uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    float value = 0;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

template <class Element, class Sum = Element>
void reduce_as(Span into, std::span<const Span> sources, NcclOp op) {
  for (std::size_t at = 0; at < into.size(); at += sizeof(Element)) {
    Sum sum{};
    for (std::size_t i = 0; i < sources.size(); ++i) {
      alignas(Element) std::byte bytes[sizeof(Element)];
      std::memcpy(bytes, sources[i].data() + at, sizeof bytes);
      const auto value = static_cast<Sum>(*reinterpret_cast<const Element*>(bytes));
      if (i == 0)
        sum = value;
      else if (op == NcclOp::product)
        sum = static_cast<Sum>(sum * value);
      else if (op == NcclOp::max)
        sum = std::max(sum, value);
      else if (op == NcclOp::min)
        sum = std::min(sum, value);
      else
        sum = static_cast<Sum>(sum + value);
    }
    if (op == NcclOp::average) sum = static_cast<Sum>(sum / static_cast<Sum>(sources.size()));
    const Element element(sum);
    std::memcpy(into.data() + at, &element, sizeof element);
  }
}

}  // namespace

std::size_t bytes_of(NcclType type) {
  switch (type) {
    case NcclType::i8:
    case NcclType::u8:
      return 1;
    case NcclType::f16:
    case NcclType::bf16:
      return 2;
    case NcclType::i32:
    case NcclType::u32:
    case NcclType::f32:
      return 4;
    default:
      return 8;
  }
}

void reduce(Span into, std::span<const Span> sources, NcclType type, NcclOp op) {
  switch (type) {
    case NcclType::i8:
      return reduce_as<std::int8_t>(into, sources, op);
    case NcclType::u8:
      return reduce_as<std::uint8_t>(into, sources, op);
    case NcclType::i32:
      return reduce_as<std::int32_t, std::uint32_t>(into, sources, op);
    case NcclType::u32:
      return reduce_as<std::uint32_t>(into, sources, op);
    case NcclType::i64:
      return reduce_as<std::int64_t>(into, sources, op);
    case NcclType::u64:
      return reduce_as<std::uint64_t>(into, sources, op);
    case NcclType::f16:
      return reduce_as<_Float16, float>(into, sources, op);
    case NcclType::bf16:
      return reduce_as<Bf16, float>(into, sources, op);
    case NcclType::f32:
      return reduce_as<float>(into, sources, op);
    case NcclType::f64:
      return reduce_as<double>(into, sources, op);
  }
}

void Exchange::send(int to, Span data) {
  if (!data.empty()) ways_[to].out.push_back(data);
}

void Exchange::receive(int from, Span room) {
  if (!room.empty()) ways_[from].in.push_back(room);
}

Span Exchange::room(std::size_t bytes) {
  return *rooms_.emplace_back(std::make_shared<std::vector<std::byte>>(bytes));
}

bool Exchange::move(int socket, std::deque<Span>& parts, bool is_out) {
  while (!parts.empty()) {
    Span& part = parts.front();
    const ssize_t count =
        is_out ? ::send(socket, part.data(), part.size(), MSG_NOSIGNAL) : ::recv(socket, part.data(), part.size(), 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (count <= 0) {
      // A kernel that waits for a rank that has gone never ends.
      state_->failure = static_cast<int>(remote_error);
      return false;
    }
    part = part.subspan(static_cast<std::size_t>(count));
    if (part.empty()) parts.pop_front();
  }
  return true;
}

bool Exchange::step() {
  if (state_->is_aborted) return true;
  bool is_done = true;
  for (auto& [rank, way] : ways_) {
    if (rank == rank_) {
      for (; !way.out.empty() && !way.in.empty(); way.out.pop_front(), way.in.pop_front())
        std::memmove(way.in.front().data(), way.out.front().data(), way.in.front().size());
      is_done = way.out.empty() && way.in.empty() && is_done;
      continue;
    }
    const int socket = sockets_[static_cast<std::size_t>(rank)];
    is_done = move(socket, way.out, true) && is_done;
    is_done = move(socket, way.in, false) && is_done;
  }
  if (!is_done) return false;
  for (const auto& end : ends_) end();
  return true;
}

}  // namespace fake
