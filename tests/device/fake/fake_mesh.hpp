// SPDX-License-Identifier: Apache-2.0
#pragma once
// What one batch of the fake NCCL moves: over sockets, one to each other rank, all of it at the same time.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "src/device/nccl.hpp"

namespace fake {

using muster::cuda::NcclOp;
using muster::cuda::NcclStatus;
using muster::cuda::NcclType;

inline constexpr auto system_error = static_cast<NcclStatus>(2);
inline constexpr auto invalid_argument = static_cast<NcclStatus>(4);
inline constexpr auto invalid_usage = static_cast<NcclStatus>(5);
inline constexpr auto remote_error = static_cast<NcclStatus>(6);

using Span = std::span<std::byte>;

std::size_t bytes_of(NcclType type);
/// into = the sources' elements in their order.
void reduce(Span into, std::span<const Span> sources, NcclType type, NcclOp op);

/// What a communicator still owes a stream that it is gone from: nothing once it was aborted.
struct State {
  std::atomic<int> failure{0};  // an NcclStatus
  std::atomic<bool> is_aborted{false};
};

/// What one batch of one communicator moves, all of it at once; it is copied for each time that it runs.
class Exchange {
 public:
  Exchange(int rank, std::vector<int> sockets, std::shared_ptr<State> state)
      : rank_(rank), sockets_(std::move(sockets)), state_(std::move(state)) {}
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(sockets_.size()); }
  void send(int to, Span data);
  void receive(int from, Span room);
  /// Room of its own, for as long as it lives.
  Span room(std::size_t bytes);
  void at_end(std::function<void()> work) { ends_.push_back(std::move(work)); }
  /// One try; true when all is done, or the communicator was aborted.
  bool step();

 private:
  struct Way {
    std::deque<Span> out;
    std::deque<Span> in;
  };
  bool move(int socket, std::deque<Span>& parts, bool is_out);
  int rank_;
  std::vector<int> sockets_;
  std::shared_ptr<State> state_;
  std::map<int, Way> ways_;  // by rank; to itself likewise
  std::vector<std::shared_ptr<std::vector<std::byte>>> rooms_;
  std::vector<std::function<void()>> ends_;
};

}  // namespace fake
