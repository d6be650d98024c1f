// SPDX-License-Identifier: Apache-2.0
#pragma once
// MessageQueue: one rank writes, all others of the host read every message, in order. Semantics: vLLM's MessageQueue
// (shm_broadcast), without its pickle, its polling and its waits without end.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "muster/config.hpp"
#include "muster/process_group.hpp"
#include "muster/sync_group.hpp"

namespace muster {

struct QueueOptions {
  int writer = 0;
  std::uint64_t capacity = 4 << 20;  ///< bytes that the slowest reader may be behind; 64 KiB at least
  /// What a dead reader is to the writer: dropped, or Error(peer_lost) once it has to wait for it.
  enum class DeadReader : std::uint8_t { fail, drop } dead_reader = DeadReader::fail;
  CollectiveOptions waits = {};
};

/// Of any length: a message that is longer than a quarter of the capacity goes through it in pieces. One thread at a
/// time on each rank. A reader gets what a dead writer has written before, then Error(peer_lost).
class MessageQueue {
 public:
  /// Collective over `group`, whose ranks share memory (else Error(unsupported) on all). Throws Error(argument) on a
  /// writer that is not there or a capacity that is too small, Error(rank_mismatch) if the ranks' options differ; and
  /// as SyncGroup::duplicate().
  explicit MessageQueue(SyncGroup& group, const QueueOptions& options = {});
  MessageQueue(MessageQueue&&) noexcept;
  MessageQueue& operator=(MessageQueue&&) noexcept;
  ~MessageQueue();

  /// The writer's: returns when it is written; waits while the slowest reader is too far behind. Throws
  /// Error(argument) on a reader, and as SyncGroup::wait_until.
  void put(std::span<const std::byte> message, const CollectiveOptions& options = {});
  void put_config(const Config& config, const CollectiveOptions& options = {});
  /// A reader's: the next message. Throws Error(argument) on the writer, and as SyncGroup::wait_until.
  [[nodiscard]] std::vector<std::byte> get(const CollectiveOptions& options = {});
  [[nodiscard]] Config get_config(const CollectiveOptions& options = {});
  /// A reader's: whether there is a message, or the begin of one. Never waits.
  [[nodiscard]] bool has_message() const noexcept;

 private:
  class Ring;
  std::unique_ptr<Ring> ring_;
};

}  // namespace muster
