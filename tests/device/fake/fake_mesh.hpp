// SPDX-License-Identifier: Apache-2.0
#pragma once
// The transfers of one batch of the fake NCCL: over one socket per rank, all at the same time.

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

#include "src/cuda/nccl.hpp"

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
/// Writes the reduction of the sources' elements, in the order of the sources.
void reduce(Span into, std::span<const Span> sources, NcclType type, NcclOp op);

/// State that work in streams shares with a communicator, which may be destroyed earlier. After an abort nothing more
/// is moved.
struct State {
  std::atomic<int> failure{0};  // an NcclStatus
  std::atomic<bool> is_aborted{false};
};

/// The transfers of one batch of one communicator, all at the same time. It is copied for each run.
class Exchange {
 public:
  Exchange(int rank, std::vector<int> sockets, std::shared_ptr<State> state)
      : rank_(rank), sockets_(std::move(sockets)), state_(std::move(state)) {}
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(sockets_.size()); }
  void send(int to, Span data);
  void receive(int from, Span room);
  /// Returns temporary memory that lives as long as the exchange.
  Span room(std::size_t bytes);
  void at_end(std::function<void()> work) { ends_.push_back(std::move(work)); }
  /// Makes one attempt. Returns true when all is done, or the communicator was aborted.
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
  std::map<int, Way> ways_;  // by rank, including this one
  std::vector<std::shared_ptr<std::vector<std::byte>>> rooms_;
  std::vector<std::function<void()>> ends_;
};

}  // namespace fake
