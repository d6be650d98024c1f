// SPDX-License-Identifier: Apache-2.0
#pragma once
// The length of the pieces of a long message to a rank of another host, over a transport that agrees with the receiver
// on each long message before it sends the bytes (MPI).
//
// On a slow link these agreements wait behind the bytes of the other direction. Two ranks that send to each other then
// take turns, and each direction has half of the link. Pieces that MPI sends without an agreement avoid this, but cost
// more processor time, which matters on fast links. So the first pieces are long. If they arrive slowly, the pieces of
// the next 256 MiB are short, and then the speed is measured again.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace muster::multihost {

inline constexpr std::size_t long_piece = 1 << 20;
/// MPICH with UCX sends up to 16 KiB without an agreement over TCP, Open MPI up to 64 KiB.
inline constexpr std::size_t short_piece = 12 << 10;

class PieceLength {
 public:
  using Time = std::chrono::steady_clock::time_point;

  [[nodiscard]] std::size_t longest() const noexcept { return is_short_ ? short_piece : long_piece; }

  /// Called before a packet is sent. `untaken`: bytes of earlier packets that the receiver has not received yet.
  void before_sending(std::uint64_t bytes, std::uint64_t untaken, Time now) noexcept {
    // Nothing is on its way: the program limits the speed, and not the link.
    if (!is_short_ && untaken == 0) restart(now, 0);
    const std::uint64_t received = sent_ + untaken_before_ - std::min(untaken, sent_ + untaken_before_);
    if (is_short_ && sent_ >= sent_short) {
      is_short_ = false;
      restart(now, untaken);
    } else if (!is_short_ && received >= measured) {
      const std::chrono::duration<double> took = now - begin_;
      is_short_ = static_cast<double>(received) < slow_bytes_per_second * took.count();
      restart(now, untaken);
    }
    sent_ += bytes;
  }

 private:
  static constexpr std::uint64_t measured = 8 << 20;
  static constexpr std::uint64_t sent_short = 256 << 20;
  static constexpr double slow_bytes_per_second = 100e6;

  void restart(Time now, std::uint64_t untaken) noexcept {
    begin_ = now;
    untaken_before_ = untaken;
    sent_ = 0;
  }

  bool is_short_ = false;
  std::uint64_t sent_ = 0;            // since begin_
  std::uint64_t untaken_before_ = 0;  // at begin_
  Time begin_{};
};

}  // namespace muster::multihost
