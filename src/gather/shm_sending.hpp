// SPDX-License-Identifier: Apache-2.0
#pragma once
// A sender's side of an exchange over shared memory (shm_protocol.hpp).

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "src/core/descriptor.hpp"
#include "src/gather/route.hpp"
#include "src/gather/shm_protocol.hpp"

namespace muster::gather {

/// Made before round 1; what it lent is withdrawn when it goes without commit().
class ShmSending {
 public:
  ShmSending(const Call& call, ShmState& state);
  ~ShmSending();
  ShmSending(const ShmSending&) = delete;
  ShmSending& operator=(const ShmSending&) = delete;
  void offer(Record& record);
  void move(ExchangeReport& report);
  void commit() noexcept;
  std::vector<std::unique_ptr<Obligation>> obligations();

 private:
  struct Lent {
    std::shared_ptr<detail::ArenaCore> arena;
    shm::LeaseId lease;
    std::vector<std::span<const std::byte>> watched;
    bool is_new = false;  // to the first rank
  };
  std::optional<core::Place> place(const Tensor& tensor);
  std::uint32_t lend(const std::shared_ptr<detail::ArenaCore>& arena);
  [[nodiscard]] std::vector<std::byte> message(std::span<const std::byte> body) const;
  void lend_slot();
  void send(std::span<const std::byte> message) const;
  void write();

  const Call& call_;
  ShmState& state_;
  std::vector<std::byte> message_;
  core::SlotLayout layout_;
  std::vector<std::pair<std::uint64_t, const Tensor*>> moving_;  // into the caller's tree, which stays during the call
  std::uint64_t moving_payload_ = 0;
  std::uint64_t arena_payload_ = 0;
  std::vector<Lent> lent_;
  shm::SlotPlan plan_;
  std::shared_ptr<shm::Slot> slot_;
  shm::LeaseId slot_lease_;
  bool is_small_ = false;  // with its message, which then stands behind the bytes
  bool is_written_ = false;
  bool committed_ = false;
};

}  // namespace muster::gather
