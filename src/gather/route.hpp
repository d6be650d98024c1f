// SPDX-License-Identifier: Apache-2.0
#pragma once
// Routes: the ways that bytes travel. A route registers itself with the policy, so that the exchange knows none of them
// by name.

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
#include "src/os/clock.hpp"
#include "src/sync/group.hpp"

namespace muster::shm {
class Slot;
}

namespace muster::gather {

/// Who brings tensors into a slot that the CPU cannot read (those on devices).
class SlotFiller {
 public:
  virtual ~SlotFiller() = default;
  /// Returns when all of them are at their offsets, which grow; `bytes` is where the last one ends. Throws Error.
  virtual void fill(const std::shared_ptr<shm::Slot>& slot, std::uint64_t bytes,
                    std::span<const std::pair<std::uint64_t, const Tensor*>> tensors) = 0;
};

/// What one rank brings to an exchange. Everything outlives the exchange's call.
struct Call {
  Operation operation = Operation::configs;
  const Config* value = nullptr;  ///< null: none
  const Merge* merge = nullptr;   ///< of Operation::merge, whose value is one tensor
  std::vector<int> list;          ///< empty: in no list
  std::uint32_t position = no_position;
  sync::Group* group = nullptr;
  const GatherOptions* options = nullptr;
  Route forced = Route::automatic;  ///< by the options or by MUSTER_ROUTE, as this rank's record has it
  std::uint64_t number =
      0;  ///< of the exchange in its group: tells what belongs to it from what an earlier, failed one left behind
  SlotFiller* filler = nullptr;  ///< null: the CPU copies
  /// Brings the value's elements to where the CPU reads them; none: they are there. A sender's move() calls it before
  /// it promises anything: its failure is one of the move. Then `value` is another tree, of tensors of the same shapes.
  std::function<void()> stage = {};
  bool is_part = false;  ///< of a stream: obligations, not a closing round, tell that its bytes have been taken

  [[nodiscard]] bool is_member() const noexcept { return position != no_position; }
  [[nodiscard]] bool is_first() const noexcept { return position == 0; }
  [[nodiscard]] bool is_sender() const noexcept { return is_member() && !is_first(); }
  [[nodiscard]] int first() const noexcept { return list.front(); }
  [[nodiscard]] WaitOptions wait(const char* phase) const {
    return {.timeout = options->timeout, .stop = options->stop, .phase = phase};
  }
};

/// Something of this rank that the first rank holds after an exchange.
class Obligation {
 public:
  virtual ~Obligation() = default;
  /// It was given back; not told where the holder died instead. Cheap: asked in a loop. Any thread.
  [[nodiscard]] virtual bool is_given_back() const noexcept = 0;
  /// Returns whether it was given back (or the holder died) by then. Any thread.
  virtual bool wait(os::Clock::time_point deadline) const = 0;
  /// The first rank will not look for it any more: ends it unless the first rank has it.
  virtual void withdraw() noexcept {}
};

/// One exchange on one rank. Called in this order; each may throw Error, which becomes the status of the next round.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Before round 1: decides what will be needed and writes it into the record. Allocates nothing shared. On a rank
  /// that has no tensors it may come after round 1, where others have made the route another than the rank had guessed:
  /// what the record says of a value without tensors is the same on all routes that are not forced.
  virtual void offer(Record& record) = 0;
  /// After round 1, on members: senders hand over, the first rank takes in. A sender hands over its descriptor even
  /// when the rest fails.
  virtual void move(std::span<const Record> records, ExchangeReport& report) = 0;
  /// After the last round, when every rank is well: from here on what was moved counts.
  virtual void commit() noexcept {}
  /// On the first rank: the entries of the other members, by position. Its own place stays empty if its value is to
  /// be as the caller gave it; a merge's result is there, or what the route has made of the own value.
  virtual std::vector<std::optional<Config>> deliver() { return {}; }
  /// On a sender: what the first rank now holds.
  virtual std::vector<std::unique_ptr<Obligation>> obligations() { return {}; }
  /// Shared memory that this rank's pool holds.
  [[nodiscard]] virtual std::uint64_t pool_bytes() const noexcept { return 0; }
};

/// A sender's side of a stream whose parts the first rank takes in while it is busy with earlier ones. Routes that have
/// none move every part as a Transfer.
class PartSender {
 public:
  virtual ~PartSender() = default;
  /// Waits until fewer than `depth` parts are with the first rank.
  virtual void wait_for_credit(std::size_t depth, const WaitOptions& options) = 0;
  /// Looks at what the next part has (null: nothing) and writes it into the record. `value` stays until send() returns.
  virtual void offer(const Config* value, Record& record) = 0;
  /// Sends the header and what was offered. When it returns, the value's memory is the caller's again.
  virtual void send(std::span<const std::byte> header, const WaitOptions& options) = 0;
  /// After the last part, and after a failure that left `group` well: when it returns, nothing is under way, and the
  /// first rank's PartReceiver has done the same. Its waits are `group`'s.
  virtual void settle(SyncGroup& group, const WaitOptions& options) = 0;
};

/// The first rank's side.
class PartReceiver {
 public:
  virtual ~PartReceiver() = default;
  /// Whether a sender's parts come this way.
  [[nodiscard]] virtual bool brings(int sender) const = 0;
  /// The header of a sender's next part, and the record that was in it when it was offered.
  virtual std::vector<std::byte> take_header(int sender, const WaitOptions& options) = 0;
  /// What belongs to the header that was taken last, whole; none if the sender has nothing. Its tensors are views of
  /// memory whose last owner gives the sender a credit.
  virtual std::optional<Config> take_part(int sender, const WaitOptions& options) = 0;
  /// While this is set, and the route's library may be called by any thread, parts go on coming in beside the caller.
  virtual void set_unattended(bool unattended) = 0;
  virtual void settle(SyncGroup& group, const WaitOptions& options) = 0;
  /// The most memory that it had at any moment.
  [[nodiscard]] virtual std::uint64_t peak_bytes() const = 0;
};

/// What a route has to make sure of, on all ranks of a list together, before bytes move. Made before round 1, where it
/// says in the record that a round for it is needed.
class Preflight {
 public:
  virtual ~Preflight() = default;
  /// On members. What it throws becomes the status of that round.
  virtual void check(std::span<const Record> records) = 0;
  /// Every rank is well.
  virtual void commit() noexcept = 0;
};

class RouteDriver {
 public:
  virtual ~RouteDriver() = default;
  [[nodiscard]] virtual Route route() const noexcept = 0;
  /// Whether this rank could take part over this route. Local; cheap.
  [[nodiscard]] virtual bool is_usable(const Call& call) const = 0;
  /// Why it is not, and the remedy: for messages, of a call that is_usable() is false for.
  [[nodiscard]] virtual std::string obstacle(const Call& call) const = 0;
  /// Why it is chosen, for explain().
  [[nodiscard]] virtual std::string reason(const Call& call) const = 0;
  /// Null if there is nothing to check. May throw as Transfer::offer.
  virtual std::unique_ptr<Preflight> preflight(const Call& /*call*/, Record& /*record*/) const { return nullptr; }
  /// Of a call whose bytes move (moves_elements()), and of any that is no merge.
  virtual std::unique_ptr<Transfer> begin(const Call& call) const = 0;
  /// A stream's own ends. `call` has the group that its messages go by, and outlives them. Null: parts are Transfers.
  virtual std::unique_ptr<PartSender> open_part_sender(const Call& /*call*/) const { return nullptr; }
  virtual std::unique_ptr<PartReceiver> open_part_receiver(const Call& /*call*/, std::uint64_t /*part_bytes*/) const {
    return nullptr;
  }
  /// Whether the first rank of a stream receives into memory of its own, and not into the senders'.
  [[nodiscard]] virtual bool receives_into_own() const noexcept { return false; }
  /// Whether the route copies this tensor's bytes: false if it only names them, wherever they are.
  [[nodiscard]] virtual bool moves(const TensorView& tensor) const;
  /// What other ranks still hold of this one's memory no longer counts as its pool, and goes when they give it back.
  /// Free memory stays, or goes too. Returns the bytes that remain in the pool.
  enum class Keep : std::uint8_t { free_memory, nothing };
  virtual std::uint64_t settle(SyncGroup& /*group*/, Keep /*keep*/) const { return 0; }
  /// Gives free memory that the route keeps with the group back to the system; returns the bytes.
  virtual std::uint64_t trim(SyncGroup& /*group*/) const { return 0; }
  /// The group has failed: what was lent to ranks that are dead is taken back.
  virtual void clean_up(SyncGroup& /*group*/) const noexcept {}
};

/// How parts of a stream come from devices to the host, where a library of this program can bring them.
class HostStaging {
 public:
  virtual ~HostStaging() = default;
  /// Of a part whose tensors are all on devices, and whose route copies them into slots: without memory besides those.
  /// `call` outlives it. Throws Error.
  virtual std::unique_ptr<SlotFiller> filler(const Call& call) const = 0;
  /// The part with all its tensors on the host, whole. Its memory is used again when nobody holds it. Throws Error, and
  /// as a wait of `group`.
  virtual Config to_host(const Config& part, SyncGroup& group, const WaitOptions& options) const = 0;
  /// Memory of the host that it has for this group's parts.
  [[nodiscard]] virtual std::uint64_t bytes(SyncGroup& group) const = 0;
};

/// All drivers that this program has. Which of them a list takes is the policy (policy.hpp). A library that is loaded
/// late adds its own while other threads exchange: drivers stay where they are, and are never taken out.
class RouteTable {
 public:
  static RouteTable& instance();
  void add(std::unique_ptr<RouteDriver> driver);
  [[nodiscard]] std::span<const std::unique_ptr<RouteDriver>> drivers() const noexcept {
    return std::span(drivers_).first(count_.load(std::memory_order_acquire));
  }
  [[nodiscard]] const RouteDriver* find(Route route) const noexcept;
  void set_staging(std::unique_ptr<HostStaging> staging);
  /// Null if no library of this program can reach devices.
  [[nodiscard]] const HostStaging* staging() const noexcept { return staging_.load(std::memory_order_acquire); }

 private:
  RouteTable();
  ForkMutex adding_;
  std::array<std::unique_ptr<RouteDriver>, 8> drivers_;  // a bit each in Record::routes
  std::atomic<std::size_t> count_{0};
  std::atomic<const HostStaging*> staging_{nullptr};
};

std::unique_ptr<RouteDriver> make_shm_route();
std::unique_ptr<RouteDriver> make_workspace_route();

/// A rank's next message of this exchange: all begin with its number. What a failed one left behind is passed over.
std::vector<std::byte> receive_of(const Call& call, int from, std::uint64_t most, const char* phase);
/// A value as a message has it.
template <class T>
void append(std::vector<std::byte>& message, const T& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  message.insert(message.end(), bytes.begin(), bytes.end());
}

/// False of merges that take the first rank's tensor as it is, and where there is no other rank.
bool moves_elements(const Call& call);
/// The call's transfer: the driver's, or of a merge that moves nothing one of no route.
std::unique_ptr<Transfer> begin_transfer(const RouteDriver& driver, const Call& call);

}  // namespace muster::gather
