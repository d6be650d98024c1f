// SPDX-License-Identifier: Apache-2.0
#pragma once
// Messages between a sender and the first rank of an exchange that lands on a device (landing.hpp).

#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "muster/error.hpp"
#include "src/device/nccl_lists.hpp"
#include "src/gather/route.hpp"
#include "src/gather/shm_protocol.hpp"

namespace muster::cuda {

inline constexpr std::uint32_t most_exports = 65536;
/// Tensors of one sender in a batch of NCCL: the same on both sides.
inline constexpr std::size_t nccl_batch = 512;

/// From the sender; `exports` times Export, `gone` times a buffer's number, and the descriptor follow.
struct OfferHeader {
  std::uint64_t exchange = 0;
  std::uint64_t body_bytes = 0;
  std::uint64_t body_hash = 0;
  std::uint32_t exports = 0;
  std::uint32_t gone = 0;
  std::uint32_t communicator = 0;  // of NCCL
  std::uint32_t has_failed = 0;    // nothing follows: round 2 says why
};

enum class Verdict : std::uint32_t { failed, taken, stage };

struct Answer {
  std::uint64_t exchange = 0;
  Verdict verdict = Verdict::failed;
  std::uint32_t communicator = 0;
  std::uint32_t is_new = 0;
  std::int32_t size = 0;
  std::int32_t rank = 0;
  NcclId id{};
};

template <class T>
void append(std::vector<std::byte>& message, const T& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  message.insert(message.end(), bytes.begin(), bytes.end());
}

/// Cuts values off the front of a message. Throws Error(corrupt) where it is too short.
class MessageReader {
 public:
  explicit MessageReader(std::span<const std::byte> message) : left_(message) {}
  template <class T>
  T take() {
    if (left_.size() < sizeof(T)) throw Error(ErrorKind::corrupt, "a message of a rank is too short");
    T value;
    std::memcpy(&value, left_.data(), sizeof value);
    left_ = left_.subspan(sizeof value);
    return value;
  }
  [[nodiscard]] std::span<const std::byte> rest() const noexcept { return left_; }

 private:
  std::span<const std::byte> left_;
};

using gather::receive_of;

/// Runs what ranks do by NCCL once all have agreed to. Who fails there leaves the others in the middle of it, and NCCL
/// tells them late or never: the failure is the group's, at once, and what is under way is aborted. `members`: the
/// others that take part.
void by_nccl_or_fail(const gather::Call& call, std::span<const int> members, NcclLists::Entry& entry,
                     const std::function<void()>& work);

inline Answer receive_answer(const gather::Call& call) {
  const std::vector<std::byte> message =
      receive_of(call, call.first(), sizeof(Answer) + 4096, "gather: offering device memory");
  return MessageReader(message).take<Answer>();
}

}  // namespace muster::cuda
