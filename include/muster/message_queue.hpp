// SPDX-License-Identifier: Apache-2.0
#pragma once
// MessageQueue: one rank writes, all others of the host read every message, in order. Semantics: vLLM's MessageQueue
// (shm_broadcast), without its pickle, its polling and its waits without end.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/process_group.hpp"
#include "muster/sync_group.hpp"

namespace muster {

struct QueueOptions {
  int writer = 0;
  /// The only rank that reads, which may be the writer itself; none: all read but the writer.
  std::optional<int> reader = {};
  /// Of a writer that is no rank of the group (queue_handle()); `writer` does not count then.
  std::string outside_writer = {};
  std::uint64_t capacity = 4 << 20;  ///< bytes that the slowest reader may be behind; 64 KiB at least
  /// What a dead reader is to the writer: dropped, or Error(peer_lost) once it has to wait for it.
  enum class DeadReader : std::uint8_t { fail, drop } dead_reader = DeadReader::fail;
  CollectiveOptions waits = {};
};

/// The handle of a queue whose writer is no rank of the group that reads it, which has so many ranks: one line of text
/// for all of them and the writer, good for one queue. Any process makes it. It is no secret: a process of another user
/// is refused. Throws Error(argument) unless `ranks` is 1 to 255.
std::string queue_handle(int ranks);

/// Messages are of any length: one that is longer than a quarter of the capacity goes through it in pieces, a Config of
/// 64 KiB or more lies in memory of the writer that readers map, where it counts as much as in the ring. One thread at
/// a time on each rank. A reader gets what a dead writer has written before, then Error(peer_lost).
class MessageQueue {
 public:
  /// Collective over `group`, whose ranks share memory (else Error(unsupported) on all), and over the writer outside if
  /// there is one; waits for all of them. Throws Error(argument) on a rank that is not there, a capacity that is too
  /// small or a handle that is none or is for another number of ranks, Error(rank_mismatch) if the ranks' options
  /// differ; and as SyncGroup::duplicate() and local_group().
  explicit MessageQueue(SyncGroup& group, const QueueOptions& options = {});
  /// Of the writer outside. `options`: the same as the ranks', but for `waits`; `outside_writer` is the handle. Errors
  /// about this process tell its pid(), and no rank(); their words call it rank -1. Throws as the ranks' constructor.
  static MessageQueue write_from_outside(const QueueOptions& options);
  MessageQueue(MessageQueue&&) noexcept;
  MessageQueue& operator=(MessageQueue&&) noexcept;
  ~MessageQueue();

  /// The writer's: returns when it is written; waits while the slowest reader is too far behind. Throws
  /// Error(argument) on another rank, and if it would have to wait for itself (a writer that reads has room for half
  /// the capacity); and as SyncGroup::wait_until.
  void put(std::span<const std::byte> message, const CollectiveOptions& options = {});
  void put_config(const Config& config, const CollectiveOptions& options = {});
  /// A reader's: the next message. Throws as put().
  [[nodiscard]] std::vector<std::byte> get(const CollectiveOptions& options = {});
  /// Tensors of one that came as 64 KiB or more are read-only, and are the writer's memory as long as they are held,
  /// whoever has died by then.
  [[nodiscard]] Config get_config(const CollectiveOptions& options = {});
  /// A reader's: whether there is a message, or the begin of one. Never waits.
  [[nodiscard]] bool has_message() const noexcept;

 private:
  class Ring;
  explicit MessageQueue(std::unique_ptr<Ring> ring);
  std::unique_ptr<Ring> ring_;
};

}  // namespace muster
