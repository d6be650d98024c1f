// SPDX-License-Identifier: Apache-2.0
#pragma once
// The pulse of a file group: others' is read out of names in the last listing; the own one becomes a name at each
// heartbeat, where it has changed.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "src/sync/pulse.hpp"
#include "src/workspace/group_directory.hpp"
#include "src/workspace/names.hpp"

namespace muster::workspace {

/// Thread-safe.
class GroupPulse final : public sync::Pulse, public GroupDirectory::Watcher {
 public:
  /// `self`: this rank's number in the group.
  static std::shared_ptr<GroupPulse> create(std::shared_ptr<GroupDirectory> directory, int group, int self);

  [[nodiscard]] int group() const noexcept { return group_; }
  [[nodiscard]] bool has_left(int rank) const override;
  [[nodiscard]] std::uint64_t progress_of(int rank) const override;
  [[nodiscard]] std::uint32_t awaited_by(int rank) const override;
  void tell_awaited(int self, std::uint32_t awaited) noexcept override;
  [[nodiscard]] std::string phase(int rank) const override;
  /// A failure that cannot be told the others counts here alone, until a later heartbeat can tell it.
  void poison(const Error& cause) noexcept override;
  [[nodiscard]] std::optional<Error> failure() const override;
  [[nodiscard]] bool has_failure() const noexcept override { return has_failure_.load(std::memory_order_acquire); }

  void progress() noexcept { progress_.fetch_add(1, std::memory_order_relaxed); }
  /// Static text.
  void set_phase(const char* phase) noexcept { phase_.store(phase, std::memory_order_relaxed); }

  void notice(const Snapshot& snapshot, bool is_heartbeat) override;

 private:
  GroupPulse(std::shared_ptr<GroupDirectory> directory, int group, int self);
  void publish_own();
  void publish_failure(const Error& cause);
  void set_failure(const Error& cause) noexcept;
  void load_failure();
  [[nodiscard]] PulseName pulse_of(int rank) const;

  std::shared_ptr<GroupDirectory> directory_;
  int group_;
  int self_;
  std::atomic<std::uint64_t> progress_{0};
  std::atomic<std::uint32_t> awaited_{0};
  std::atomic<const char*> phase_{sync::between_calls};

  std::mutex own_mutex_;  // of what follows: the name that is there
  std::optional<PulseName> published_;

  mutable std::mutex failure_mutex_;
  std::optional<Error> failure_;
  bool is_untold_ = false;  // the failure is not in the directory
  std::atomic<bool> has_failure_{false};
};

}  // namespace muster::workspace
