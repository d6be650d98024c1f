// SPDX-License-Identifier: Apache-2.0
#pragma once
// MessageQueue: one rank writes, and all other ranks of the host read every message in order. Semantics: MessageQueue
// (shm_broadcast) of vLLM. Messages are bytes or Configs instead of pickles, waits do not poll, and every wait has a
// deadline.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/group.hpp"
#include "muster/process_group.hpp"

namespace muster {

/// Options of a queue; the same on all its ranks, except `wait`.
struct QueueOptions {
  /// The rank that writes.
  int writer = 0;
  /// The only reader; it may be the writer itself. Unset: all ranks except the writer read.
  std::optional<int> reader = {};
  /// The handle (make_queue_handle()) of a writer that is not a rank of the group. `writer` is then ignored.
  std::string external_writer = {};
  std::uint64_t capacity = 4 << 20;  ///< bytes that the slowest reader may be behind; at least 64 KiB
  /// The effect of a dead reader on the writer: it is dropped, or the writer throws Error(peer_lost) when it has to
  /// wait for it.
  enum class DeadReader : std::uint8_t { fail, drop };
  /// The effect of a dead reader in this queue.
  DeadReader dead_reader = DeadReader::fail;
  /// The deadline and the stop request of the constructor.
  CollectiveOptions wait = {};
};

/// Returns a handle of a queue whose writer is not a rank of the group that reads it, which has `ranks` ranks. The
/// handle is one line of text that all of them and the writer use, for a single queue. Any process may create it. It is
/// not a secret: processes of another user are rejected. Local. Throws Error(invalid_argument) unless `ranks` is 1 to
/// 255.
std::string make_queue_handle(int ranks);

/// A queue for messages of any length. A message longer than a quarter of the capacity is passed in pieces. A Config of
/// 64 KiB or more is stored in memory of the writer that readers map; it counts against the capacity in the same way.
/// One thread at a time on each rank. If the writer dies, a reader first receives the messages written before, then
/// Error(peer_lost).
class MessageQueue {
 public:
  /// Creates a queue. Collective over `group` and over the writer outside, if there is one; waits for all of them. The
  /// ranks must share memory, else all throw Error(unsupported). Throws Error(invalid_argument) if a rank does not
  /// exist, the capacity is too small, or the handle is malformed or made for another number of ranks. Throws
  /// Error(rank_mismatch) if the options of the ranks differ, and as Group::duplicate() and local_group().
  explicit MessageQueue(Group& group, const QueueOptions& options = {});
  /// Creates the queue in the writer outside. `options` are those of the ranks, except `wait`; `external_writer` is the
  /// handle. Errors about this process have its pid() and no rank(); their messages call it rank -1. Throws as the
  /// constructor of the ranks.
  static MessageQueue attach_writer(const QueueOptions& options);
  MessageQueue(MessageQueue&&) noexcept;
  MessageQueue& operator=(MessageQueue&&) noexcept;
  ~MessageQueue();

  /// Writer only: returns when the message is written. It waits while the slowest reader is too far behind. Throws
  /// Error(invalid_argument) on another rank, or if the writer would have to wait for itself (a writer that is also the
  /// reader can use half the capacity). Throws also as Group::wait_until().
  void put(std::span<const std::byte> message, const CollectiveOptions& options = {});
  /// Writer only: sends a config of any size, with tensors in host memory. Otherwise as put().
  void put_config(const Config& config, const CollectiveOptions& options = {});
  /// Reader only: returns the next message. Throws as put().
  [[nodiscard]] std::vector<std::byte> get(const CollectiveOptions& options = {});
  /// Reader only: returns the next config. Tensors of a config of 64 KiB or more are read-only. They refer to memory of
  /// the writer, which is kept as long as they exist, even if the writer dies.
  [[nodiscard]] Config get_config(const CollectiveOptions& options = {});
  /// Reader only: returns whether a message, or the beginning of one, has arrived. Does not wait.
  [[nodiscard]] bool has_message() const noexcept;

 private:
  class QueueRing;
  explicit MessageQueue(std::unique_ptr<QueueRing> ring);
  std::unique_ptr<QueueRing> ring_;
};

}  // namespace muster
