// SPDX-License-Identifier: Apache-2.0
#pragma once
// Routes: the ways in which bytes are transferred. A route registers itself with the table of routes, so that the
// exchange does not depend on any of them.

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/gather.hpp"
#include "muster/merge.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/gather/record.hpp"
#include "src/group/group.hpp"
#include "src/os/clock.hpp"

namespace muster::shm {
class Slot;
}

namespace muster::gather {

/// Copies tensors into a slot if the CPU cannot read them (tensors on devices).
class SlotFiller {
 public:
  virtual ~SlotFiller() = default;
  /// Returns when all tensors are at their offsets, which ascend. `bytes` is the end of the last tensor. Throws Error.
  virtual void fill(const std::shared_ptr<shm::Slot>& slot, std::uint64_t bytes,
                    std::span<const std::pair<std::uint64_t, const Tensor*>> tensors) = 0;
};

/// The arguments of one rank of an exchange. Everything that it points to outlives the exchange.
struct GatherCall {
  GatherKind operation = GatherKind::configs;
  const Config* value = nullptr;  ///< null: no value
  const Merge* merge = nullptr;   ///< for Operation::merge, whose value is one tensor
  std::vector<int> list;          ///< empty: in no list
  std::uint32_t position = no_position;
  group::BaseGroup* group = nullptr;
  const GatherOptions* options = nullptr;
  Route forced = Route::auto_;   ///< forced by the options or by MUSTER_ROUTE, as in this rank's record
  std::uint64_t number = 0;      ///< number of the exchange; marks its messages
  SlotFiller* filler = nullptr;  ///< null: the CPU copies
  /// Copies the value's elements to memory that the CPU can read; empty if they are there already. A sender's move()
  /// calls it before it sends anything, so that a failure is a failure of the move. Afterwards `value` is another tree
  /// with tensors of the same shapes.
  std::function<void()> stage = {};
  /// All members call Transfer::move(), so that a rank may send the parts of others (src/multihost/carriers.hpp). The
  /// same on all members.
  bool all_move = true;
  bool is_part = false;  ///< a part of a stream: obligations, not a closing round, acknowledge its bytes

  [[nodiscard]] bool is_member() const noexcept { return position != no_position; }
  [[nodiscard]] bool is_first() const noexcept { return position == 0; }
  [[nodiscard]] bool is_sender() const noexcept { return is_member() && !is_first(); }
  [[nodiscard]] int first() const noexcept { return list.front(); }
  [[nodiscard]] WaitOptions wait(const char* phase) const {
    return {.timeout = options->timeout, .stop = options->stop, .phase = phase};
  }
};

/// Memory of this rank that the root holds after an exchange.
class OutstandingLease {
 public:
  virtual ~OutstandingLease() = default;
  /// Returns whether the root has returned it. Does not detect the death of the holder. Cheap enough for a loop. Any
  /// thread.
  [[nodiscard]] virtual bool is_given_back() const noexcept = 0;
  /// Returns whether it was returned, or the holder died, before the deadline. Any thread.
  virtual bool wait(os::Clock::time_point deadline) const = 0;
  /// Called when the root will not take it any more: ends it unless the root has taken it.
  virtual void withdraw() noexcept {}
};

/// One exchange on one rank. The functions are called in this order. Each may throw Error, which becomes the status of
/// the next round.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Before round 1: determines what will be needed and writes it into the record. Allocates no shared memory. On a
  /// rank without tensors it may be called after round 1, if the records of other ranks lead to a different route than
  /// the rank had guessed. This is possible because the record of a value without tensors is the same for all routes
  /// that are not forced.
  virtual void offer(ExchangeRecord& record) = 0;
  /// After round 1, on members: senders send, and the root receives. A sender sends its descriptor even if the rest
  /// fails.
  virtual void move(const Records& records, ExchangeReport& report) = 0;
  /// After the last round, if every rank has succeeded: makes the transfer permanent.
  virtual void commit() noexcept {}
  /// On the root: returns the entries of the other members, by position. The root's own entry stays empty if its value
  /// is delivered as the caller passed it. Otherwise the entry is the result of the merge, or the route's version of
  /// the root's value.
  virtual std::vector<std::optional<Config>> deliver() { return {}; }
  /// On a sender: returns the obligations of the root.
  virtual std::vector<std::unique_ptr<OutstandingLease>> obligations() { return {}; }
  /// Returns how much shared memory this rank's pool has.
  [[nodiscard]] virtual std::uint64_t pool_bytes() const noexcept { return 0; }
};

/// A sender's side of a stream for routes on which the root receives parts while it processes earlier ones. Routes
/// without a PartSender move every part as a Transfer.
class PartSender {
 public:
  virtual ~PartSender() = default;
  /// Waits until the root has fewer than `depth` parts.
  virtual void wait_for_credit(std::size_t depth, const WaitOptions& options) = 0;
  /// Examines the next part (null: no value) and writes its sizes into the record. `value` must stay valid until send()
  /// returns.
  virtual void offer(const Config* value, ExchangeRecord& record) = 0;
  /// Sends the header and the offered part. When it returns, the caller may reuse the value's memory.
  virtual void send(std::span<const std::byte> header, const WaitOptions& options) = 0;
  /// Called after the last part, and after a failure that left `group` usable. When it returns, nothing is in flight,
  /// and the root's PartReceiver has done the same. It waits with `group`.
  virtual void settle(Group& group, const WaitOptions& options) = 0;
};

/// The root's side.
class PartReceiver {
 public:
  virtual ~PartReceiver() = default;
  /// Returns whether the parts of this sender arrive through this object.
  [[nodiscard]] virtual bool brings(int sender) const = 0;
  /// Returns the header of a sender's next part, with the record that offer() wrote.
  virtual std::vector<std::byte> take_header(int sender, const WaitOptions& options) = 0;
  /// Returns the complete part of the latest header; nullopt if the sender has no value. Its tensors are views of
  /// memory. When the last owner of that memory releases it, the sender gets a credit.
  virtual std::optional<Config> take_part(int sender, const WaitOptions& options) = 0;
  /// While this is set, parts are also received without calls of the consumer's thread, if any thread may call the
  /// route's library.
  virtual void set_unattended(bool unattended) = 0;
  virtual void settle(Group& group, const WaitOptions& options) = 0;
  /// Returns its peak memory use.
  [[nodiscard]] virtual std::uint64_t peak_bytes() const = 0;
};

/// A check that all ranks of a list make together before bytes move. It is created before round 1, and requests a round
/// for the check in the record.
class Preflight {
 public:
  virtual ~Preflight() = default;
  /// Called on members. An error becomes the status of that round.
  virtual void check(const Records& records) = 0;
  /// Called if every rank has succeeded.
  virtual void commit() noexcept = 0;
};

class RouteDriver {
 public:
  virtual ~RouteDriver() = default;
  [[nodiscard]] virtual Route route() const noexcept = 0;
  /// Returns whether this rank could use this route. Local; cheap.
  [[nodiscard]] virtual bool is_usable(const GatherCall& call) const = 0;
  /// Returns why it cannot, and the remedy, for messages. Called only if is_usable() is false.
  [[nodiscard]] virtual std::string obstacle(const GatherCall& call) const = 0;
  /// Returns why it is chosen, for explain().
  [[nodiscard]] virtual std::string reason(const GatherCall& call) const = 0;
  /// Returns null if there is nothing to check. May throw as Transfer::offer.
  virtual std::unique_ptr<Preflight> preflight(const GatherCall& /*call*/, ExchangeRecord& /*record*/) const {
    return nullptr;
  }
  /// Called for merges whose bytes move (moves_elements()), and for all other operations.
  virtual std::unique_ptr<Transfer> begin(const GatherCall& call) const = 0;
  /// Open a stream's own ends. `call` has the group that carries their messages, and outlives them. Null: parts are
  /// Transfers.
  virtual std::unique_ptr<PartSender> open_part_sender(const GatherCall& /*call*/) const { return nullptr; }
  virtual std::unique_ptr<PartReceiver> open_part_receiver(const GatherCall& /*call*/,
                                                           std::uint64_t /*part_bytes*/) const {
    return nullptr;
  }
  /// Returns whether the root of a stream receives into its own memory, not into that of the senders.
  [[nodiscard]] virtual bool receives_into_own() const noexcept { return false; }
  /// Returns whether the route copies this tensor's bytes. False if it only sends a reference to them.
  [[nodiscard]] virtual bool moves(const TensorView& tensor) const;
  /// Removes from the pool the memory that other ranks still hold; it is freed when they return it. Free memory is kept
  /// or freed as well. Returns the bytes that remain in the pool.
  enum class Keep : std::uint8_t { free_memory, nothing };
  virtual std::uint64_t settle(Group& /*group*/, Keep /*keep*/) const { return 0; }
  /// Returns the route's free memory of this group to the system; returns the bytes.
  virtual std::uint64_t trim(Group& /*group*/) const { return 0; }
  /// Called when the group has failed: takes back memory that was lent to dead ranks.
  virtual void clean_up(Group& /*group*/) const noexcept {}
};

/// Copies parts of a stream from devices to the host, if a library of this program can do that.
class HostStaging {
 public:
  virtual ~HostStaging() = default;
  /// For a part whose tensors are all on devices and whose route copies them into slots: returns a filler that needs no
  /// other memory. `call` outlives it. Throws Error.
  virtual std::unique_ptr<SlotFiller> filler(const GatherCall& call) const = 0;
  /// Returns the part with all its tensors on the host. The memory is reused when it has no owner. Throws Error, and as
  /// a wait of `group`.
  virtual Config to_host(const Config& part, Group& group, const WaitOptions& options) const = 0;
  /// Returns how much host memory it has for this group's parts.
  [[nodiscard]] virtual std::uint64_t bytes(Group& group) const = 0;
};

/// All drivers of this program. The policy chooses one of them for a list (policy.hpp). A library that is loaded late
/// adds its drivers while other threads exchange, so drivers never move and are never removed.
class RouteTable {
 public:
  static RouteTable& instance();
  void add(std::unique_ptr<RouteDriver> driver);
  [[nodiscard]] std::span<const std::unique_ptr<RouteDriver>> drivers() const noexcept {
    return std::span(drivers_).first(count_.load(std::memory_order_acquire));
  }
  [[nodiscard]] const RouteDriver* find(Route route) const noexcept;
  void set_staging(std::unique_ptr<HostStaging> staging);
  /// Returns null if no library of this program can access devices.
  [[nodiscard]] const HostStaging* staging() const noexcept { return staging_.load(std::memory_order_acquire); }

 private:
  RouteTable();
  ForkMutex adding_;
  std::array<std::unique_ptr<RouteDriver>, 8> drivers_;  // one bit each in Record::routes
  std::atomic<std::size_t> count_{0};
  std::atomic<const HostStaging*> staging_{nullptr};
};

std::unique_ptr<RouteDriver> make_shm_route();
std::unique_ptr<RouteDriver> make_workspace_route();

/// Receives a rank's next message of this exchange. All messages begin with the number of their exchange; those of
/// earlier, failed exchanges are skipped.
std::vector<std::byte> receive_of(const GatherCall& call, int from, std::uint64_t most, const char* phase);
/// Appends the bytes of a value to a message.
template <class T>
void append(std::vector<std::byte>& message, const T& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  message.insert(message.end(), bytes.begin(), bytes.end());
}

/// Returns false for merges that use the root's tensor unchanged, and if there is no other rank.
bool moves_elements(const GatherCall& call);
/// Returns the call's transfer: that of the driver, or for a merge that moves nothing a transfer without a route.
std::unique_ptr<Transfer> begin_transfer(const RouteDriver& driver, const GatherCall& call);

}  // namespace muster::gather
