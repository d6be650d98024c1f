// SPDX-License-Identifier: Apache-2.0
#pragma once
// Deliveries: control messages to hosts, of which any rank may be dead, stopped or busy.
//
//  1. A message is sent to the first rank of a host. If that rank does not confirm it in time, some others receive it.
//  2. If none of them confirms it, the host is bypassed: a spread then continues with the hosts next to it in the tree.
//  3. A rank that has not confirmed a message gets the next ones, too, but nobody waits for it until it sends
//  something.
//
// Time counts while this process runs: on a busy machine, where it rarely does, the others are slow for the same
// reason.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "muster/error.hpp"
#include "src/hosts/control.hpp"
#include "src/os/clock.hpp"

namespace muster::hosts {

/// Adds up the time that a process spends in a loop: a turn counts for no more than `longest_turn`.
class RunningTime {
 public:
  using Clock = os::Clock;
  static constexpr std::chrono::milliseconds longest_turn{15};
  /// Returns the time since the last turn.
  Clock::duration turn() noexcept;
  [[nodiscard]] Clock::duration sum() const noexcept { return sum_; }

 private:
  Clock::time_point last_ = Clock::now();
  Clock::duration sum_{};
};

/// The numbers of the ranks of each host, in the transport: the rank that is tried first is the first.
struct Contacts {
  std::vector<std::vector<int>> of_hosts;
  int mine = 0;
};

/// A message to one host.
struct Delivery {
  enum class State : std::uint8_t { open, confirmed, failed };
  State state = State::open;
  std::optional<Error> decision;  ///< the decision that the host has confirmed it with

  std::vector<int> contacts;
  Control control;
  std::function<void(const Delivery&)> over;
  std::size_t sent = 0;  ///< to so many contacts
  std::vector<int> refused;
  os::Clock::duration waited{};
};

/// A message to all hosts: each passes it to those next to it in the tree of hosts (HostTree).
struct Spread {
  std::shared_ptr<const Contacts> contacts;
  Control control;
  std::vector<bool> has_had;  ///< hosts that this rank has sent it to, or that have it
  int open = 0;               ///< deliveries that are not over
};

/// A context has one, which its lock guards.
class Deliveries {
 public:
  using Tell = std::function<void(int rank, const Control&)>;
  Deliveries(int ranks, Tell tell);

  /// `over` is called when the delivery has been confirmed or has failed.
  std::shared_ptr<const Delivery> begin(std::vector<int> contacts, const Control& control,
                                        std::function<void(const Delivery&)> over = {});
  /// Begins with the hosts next to this one. `from`: a host that has the message already.
  std::shared_ptr<const Spread> spread(std::shared_ptr<const Contacts> contacts, const Control& control, int from);
  /// A message of kind `confirm`.
  void confirm(const Control& control);
  /// The rank cannot be reached any more.
  void lose(int rank) noexcept { is_lost_[static_cast<std::size_t>(rank)] = true; }
  /// The rank has sent something.
  void hear_from(int rank) noexcept { is_silent_[static_cast<std::size_t>(rank)] = false; }
  /// Called whenever the transport is called.
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

}  // namespace muster::hosts
