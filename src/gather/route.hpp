// SPDX-License-Identifier: Apache-2.0
#pragma once
// Routes: the ways that bytes travel. A route registers itself with the policy, so that the exchange knows none of them
// by name.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/config.hpp"
#include "muster/gather.hpp"
#include "muster/merge.hpp"
#include "muster/sync_group.hpp"
#include "src/gather/record.hpp"

namespace muster::gather {

/// What one rank brings to an exchange. Everything outlives the exchange's call.
struct Call {
  Operation operation = Operation::configs;
  const Config* value = nullptr;  ///< null: none
  const Merge* merge = nullptr;   ///< of Operation::merge, whose value is one tensor
  std::vector<int> list;          ///< empty: in no list
  std::uint32_t position = no_position;
  SyncGroup* group = nullptr;
  const GatherOptions* options = nullptr;
  std::uint64_t number =
      0;  ///< of the exchange in its group: tells what belongs to it from what an earlier, failed one left behind
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
  virtual bool wait(std::chrono::steady_clock::time_point deadline) const = 0;
};

/// One exchange on one rank. Called in this order; each may throw Error, which becomes the status of the next round.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Before round 1: decides what will be needed and writes it into the record. Allocates nothing shared.
  virtual void offer(Record& record) = 0;
  /// After round 1, on members: senders hand over, the first rank takes in. A sender hands over its descriptor even
  /// when the rest fails.
  virtual void move(std::span<const Record> records, ExchangeReport& report) = 0;
  /// After the last round, when every rank is well: from here on what was moved counts.
  virtual void commit() noexcept = 0;
  /// On the first rank: the entries of the other members, by position; its own place stays empty (a merge's result is
  /// there).
  virtual std::vector<std::optional<Config>> deliver() = 0;
  /// On a sender: what the first rank now holds.
  virtual std::vector<std::unique_ptr<Obligation>> obligations() = 0;
  /// Shared memory that this rank's pool holds.
  [[nodiscard]] virtual std::uint64_t pool_bytes() const noexcept = 0;
};

/// What a route has to make sure of, on all ranks of a list together, before bytes move. Made before round 1, where it
/// says in the record that a round for it is needed.
class Proof {
 public:
  virtual ~Proof() = default;
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
  /// Why it is chosen, for explain().
  [[nodiscard]] virtual std::string reason(const Call& call) const = 0;
  /// Null where there is nothing to prove. May throw as Transfer::offer.
  virtual std::unique_ptr<Proof> prove(const Call& call, Record& record) const;
  virtual std::unique_ptr<Transfer> begin(const Call& call) const = 0;
  /// Whether the route copies this tensor's bytes: false where it only names them, wherever they are.
  [[nodiscard]] virtual bool moves(const TensorView& tensor) const;
  /// What other ranks still hold of this one's memory no longer counts as its pool, and goes when they give it back.
  /// Free memory stays, or goes too. Returns the bytes that remain in the pool.
  enum class Keep : std::uint8_t { free_memory, nothing };
  virtual std::uint64_t settle(SyncGroup& group, Keep keep) const = 0;
  /// Gives free memory that the route keeps with the group back to the system; returns the bytes.
  virtual std::uint64_t trim(SyncGroup& group) const = 0;
  /// The group has failed: what was lent to ranks that are dead is taken back.
  virtual void clean_up(SyncGroup& group) const noexcept = 0;
};

/// Drivers in the order of preference.
class RouteTable {
 public:
  static RouteTable& instance();
  void add(std::unique_ptr<RouteDriver> driver);
  [[nodiscard]] std::span<const std::unique_ptr<RouteDriver>> drivers() const noexcept { return drivers_; }
  [[nodiscard]] const RouteDriver* find(Route route) const noexcept;

 private:
  RouteTable();
  std::vector<std::unique_ptr<RouteDriver>> drivers_;
};

/// What the policy decided for one list.
struct Choice {
  Route route = Route::automatic;
  std::string reason;
};
/// The route of a list of `length` ranks that all could use `routes` (bit r: Route(r)), in the order of `preference`.
/// `forced`: Route::automatic, or the only one that is allowed. Pure. Throws Error(unsupported) that names what was
/// forced and what could be used.
Choice choose_route(std::uint32_t length, std::uint8_t routes, Route forced, std::span<const Route> preference);

/// The bits of the drivers that this rank could use.
std::uint8_t usable_routes(const Call& call);
/// GatherOptions::route, or MUSTER_ROUTE where that is automatic. Throws Error(argument) on an unknown name.
Route forced_route(const GatherOptions& options);

inline std::uint8_t route_bit(Route route) noexcept {
  return static_cast<std::uint8_t>(1U << static_cast<unsigned>(route));
}

std::unique_ptr<RouteDriver> make_local_route();
std::unique_ptr<RouteDriver> make_shm_route();
std::unique_ptr<RouteDriver> make_workspace_route();

}  // namespace muster::gather
