// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the ranks of a rendezvous say to each other (rendezvous.hpp).

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "muster/error.hpp"
#include "muster/sync_group.hpp"
#include "muster/version.hpp"
#include "src/base/written.hpp"
#include "src/os/unix_socket.hpp"

namespace muster::sync {

// These packets keep their beginning (magic, protocol, version) in all versions, so that different ones can tell each
// other so.
inline constexpr std::uint32_t hello_magic = 0x4d535452;  // "MSTR"
inline constexpr std::uint32_t protocol = 4;

struct Hello {
  std::uint32_t magic = hello_magic;
  std::uint32_t protocol_number = protocol;
  std::array<char, 24> version{};
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int64_t pid = 0;
  std::array<char, 128> host{};
};

enum class AnswerKind : std::uint32_t { welcome = 1, refusal = 2 };

struct Answer {
  std::uint32_t magic = hello_magic;
  AnswerKind kind = AnswerKind::welcome;
  SyncGroup::Nonce nonce{};
  std::uint64_t control_place = 0;
  WrittenError<1000> error = {};  // of a refusal
};

// Who the ranks are, as rank 0 passes it on: so many hellos a packet, with pidfd and region of each. One a packet would
// be a system call for every pair of ranks.
inline constexpr std::size_t cards_at_once = 64;
inline constexpr std::size_t descriptors_a_card = 2;
static_assert(cards_at_once * descriptors_a_card <= os::most_descriptors);
static_assert(sizeof(Answer) % sizeof(Hello) != 0, "they are told apart by their lengths");

inline constexpr std::size_t largest_packet = std::max(sizeof(Answer) + 256, cards_at_once * sizeof(Hello));

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

template <class T>
T parse(const os::Packet& packet, const char* what) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (packet.bytes.size() != sizeof(T))
    throw Error(ErrorKind::version,
                fmt::format("rendezvous: {} of {} bytes where {} has {}: the ranks run different builds", what,
                            packet.bytes.size(), version(), sizeof(T)));
  T value;
  std::memcpy(&value, packet.bytes.data(), sizeof value);
  return value;
}

/// Throws Error(peer_lost) if the other side has gone, Error(timeout).
void send_until(const os::Fd& socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                std::chrono::steady_clock::time_point deadline, int to);

Hello own_hello(int rank, int size);

}  // namespace muster::sync
