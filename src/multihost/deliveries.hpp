// SPDX-License-Identifier: Apache-2.0
#pragma once
// Deliveries: sends control messages to hosts on which any rank may be dead, stopped or busy.
//
//  1. A message is sent to the first rank of a host. If that rank does not confirm it in time, it is sent to up to
//     three other ranks of the host.
//  2. If none of them confirms it, the host is bypassed: the message is sent to the neighbours of that host in the tree
//     of hosts (Spread).
//  3. Later messages are also sent to a rank that has not confirmed one. But the sender does not wait for its
//     confirmations again until that rank has sent a message.
//
// Only the time in which this process runs counts. On a busy machine it rarely runs, and other ranks are slow for the
// same reason.

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "muster/error.hpp"
#include "src/base/fixed_string.hpp"
#include "src/os/clock.hpp"

namespace muster::multihost {

// Control messages: the small messages between ranks of different hosts that are not part of a round (context.hpp).

enum class ControlKind : std::uint32_t {
  notice = 1,      ///< the sender knows of a failure of the group; its host asks the receiver's host for the decision
  left = 2,        ///< the sender has left the group
  ask = 3,         ///< a waiting rank asks if the receiver makes progress, or if another rank of its host is alive
  answer = 4,      ///< the reply to `ask`
  disconnect = 5,  ///< the last group of this context has ended on the sender and on all ranks below it in the tree of
                   ///< ranks; or, if `about` is set, the sender waits at its end for that rank
  died = 6,        ///< the rank `about` is dead; also the reply to `ask`
  confirm = 7,     ///< the reply to a notice or a decision; so two ranks send in both directions or not at all
  decision = 8,    ///< the cause that all ranks of the group throw
};

/// The value of Control::group for all groups of the context.
inline constexpr std::int32_t every_group = -1;

struct Control {
  ControlKind kind = ControlKind::notice;
  std::int32_t from = 0;
  std::int32_t group = every_group;
  std::int32_t about = -1;   ///< the rank that `ask`, `died` or `disconnect` is about
  std::uint32_t round = 0;   ///< in a notice or a decision: the last round that the sender has completed
  std::uint32_t serial = 0;  ///< the number of a notice or a decision; its confirmation repeats the number
  // Used in answers:
  std::uint64_t progress = 0;
  std::int32_t waits_for = -1;  ///< the rank that the answering rank waits for
  std::int32_t has_left = 0;    ///< the sender has left the group that the message is about; also used in confirmations
  std::int32_t is_decided = 0;  ///< in a confirmation: `error` is the decision
  std::array<char, 48> phase{};
  WrittenError<1600> error = {};  ///< the cause in a notice, a decision or a confirmation
};
static_assert(std::is_trivially_copyable_v<Control> && sizeof(Control) <= 2048);

/// Measures the time that a process spends in a loop. Each turn counts as at most `longest_turn`.
class RunningTime {
 public:
  using Clock = os::Clock;
  static constexpr std::chrono::milliseconds longest_turn{15};
  /// Returns the time since the previous turn.
  Clock::duration turn() noexcept;
  [[nodiscard]] Clock::duration sum() const noexcept { return sum_; }

 private:
  Clock::time_point last_ = Clock::now();
  Clock::duration sum_{};
};

/// The ranks of each host, as the transport numbers them, in the order in which messages are sent to them. `mine` is
/// the host of this process.
struct Contacts {
  std::vector<std::vector<int>> of_hosts;
  int mine = 0;
};

/// A message to one host.
struct Delivery {
  enum class State : std::uint8_t { open, confirmed, failed };
  State state = State::open;
  std::optional<Error> decision;  ///< the decision that the confirmation contained

  std::vector<int> contacts;
  Control control;
  std::function<void(const Delivery&)> over;
  std::size_t sent = 0;  ///< the number of contacts that it was sent to
  std::vector<int> refused;
  os::Clock::duration waited{};
};

/// A message to all hosts. Each host forwards it to its neighbours in the tree of hosts (HostTree).
struct Spread {
  std::shared_ptr<const Contacts> contacts;
  Control control;
  std::vector<bool> has_had;  ///< by host: it has the message, or this rank has begun to send it there
  int open = 0;               ///< the number of unfinished deliveries
};

/// Each context has one Deliveries, which the lock of the context protects.
class Deliveries {
 public:
  using Tell = std::function<void(int rank, const Control&)>;
  Deliveries(int ranks, Tell tell);

  /// Begins a delivery. Calls `over` when it has been confirmed or has failed.
  std::shared_ptr<const Delivery> begin(std::vector<int> contacts, const Control& control,
                                        std::function<void(const Delivery&)> over = {});
  /// Begins to send a message to all hosts, first to the neighbours of this one. `informed` are hosts that already have
  /// the message; -1 stands for none.
  std::shared_ptr<const Spread> spread(std::shared_ptr<const Contacts> contacts, const Control& control,
                                       std::initializer_list<int> informed);
  /// Handles a message of kind ControlKind::confirm.
  void confirm(const Control& control);
  /// Reports that a rank can no longer be reached.
  void lose(int rank) noexcept { is_lost_[static_cast<std::size_t>(rank)] = true; }
  /// Reports that a rank has sent a message.
  void hear_from(int rank) noexcept { is_silent_[static_cast<std::size_t>(rank)] = false; }
  /// Continues all deliveries. Called whenever the transport is used.
  void advance();
  void clear() noexcept { open_.clear(); }

 private:
  void pass_on(const std::shared_ptr<Spread>& spread, int host);
  void send_further(Delivery& delivery);
  [[nodiscard]] bool is_out(const Delivery& delivery, int contact) const;

  Tell tell_;
  std::uint32_t last_serial_ = 0;
  std::vector<bool> is_lost_;
  std::vector<bool> is_silent_;
  std::vector<std::shared_ptr<Delivery>> open_;
  RunningTime time_;
};

}  // namespace muster::multihost
