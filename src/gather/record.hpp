// SPDX-License-Identifier: Apache-2.0
#pragma once
// The record that every rank contributes to round 1, and the conclusions from the records. The functions are pure. On
// one host all ranks compute them from all records. Over several hosts a rank that has all records of some lists does
// so for the others (agreement.hpp).

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "muster/error.hpp"
#include "muster/gather.hpp"
#include "muster/group.hpp"
#include "src/base/fixed_string.hpp"
#include "src/os/shared_memory.hpp"

namespace muster::gather {

enum class GatherKind : std::uint8_t { configs = 1, tensors = 2, merge = 3, stream = 4 };
const char* to_string(GatherKind operation) noexcept;

inline constexpr std::uint32_t record_version = 7;
inline constexpr std::uint32_t no_position = 0xffffffff;

/// The location of a rank's tensors. Tensors without elements do not count.
enum class Residency : std::uint8_t { none = 0, host = 1, device = 2, mixed = 3 };
/// Returns the residency of both together.
constexpr Residency operator|(Residency a, Residency b) noexcept {
  return static_cast<Residency>(static_cast<std::uint8_t>(a) | static_cast<std::uint8_t>(b));
}

/// The origin of a rank's forced route.
enum class ForcedBy : std::uint8_t { nobody, caller, workspace_path, environment };

/// Why a list has no route (policy.hpp).
enum class NoRouteReason : std::uint8_t {
  none,
  mixed,                ///< some tensors are on the host, and some on devices
  merges_devices,       ///< merges read tensors on the host
  forced_off_devices,   ///< tensors are on devices, but the forced route needs them on the host
  no_device_route,      ///< tensors are on devices, but not all ranks can receive them from there
  forced_onto_devices,  ///< the device route is forced for tensors on the host
  forced_unusable,      ///< not all ranks can use the forced route
  unreachable,          ///< no route is common to all ranks
  unfit,                ///< a rank has prepared for a route that others cannot use
};

/// A route, or the reason why there is none.
struct Decision {
  Route route = Route::auto_;  ///< for a refusal: the route that it is about, if any
  NoRouteReason refusal = NoRouteReason::none;
  [[nodiscard]] bool is_refused() const noexcept { return refusal != NoRouteReason::none; }
  friend bool operator==(const Decision&, const Decision&) = default;
};

/// Returns whether this is a route that also ranks of one host use if it is forced.
constexpr bool is_between_hosts(Route route) noexcept {
  return route == Route::mpi || route == Route::tcp;
}

constexpr std::uint8_t route_bit(Route route) noexcept {
  return static_cast<std::uint8_t>(1U << static_cast<unsigned>(route));
}

/// The record has a fixed size, so the cost of a rank in round 1 does not depend on the size of its data.
struct ExchangeRecord {
  std::uint32_t version = record_version;
  GatherKind operation = GatherKind::configs;
  std::uint8_t status = 0;  // 0: ready, else ErrorKind + 1; a later round exchanges the error texts
  Route forced = Route::auto_;
  std::uint8_t routes = 0;  // bit r: this rank could use Route(r)
  std::uint64_t list_hash = 0;
  std::uint32_t list_length = 0;  // 0: in no list
  std::uint32_t position = no_position;
  std::uint64_t payload_bytes = 0;  // tensor bytes, whether they move or not
  std::uint64_t moving_bytes = 0;   // the part of payload_bytes that the route has to move
  std::uint64_t descriptor_bytes = 0;
  std::uint64_t descriptor_hash = 0;
  // Hash of what must be equal in a list: dtype and shape, the merge, a stream's options.
  std::uint64_t kind_hash = 0;
  std::uint64_t fresh_bytes = 0;      // memory that this rank will take
  std::uint64_t available_bytes = 0;  // memory available to this rank, if it takes any
  std::uint32_t held = 0;             // results of this rank that the root holds
  os::MemoryLimit limit = os::MemoryLimit::machine;
  bool has_value : 1 = false;
  bool complete : 1 = false;         // all moving bytes have been written already (shm_route.hpp)
  bool needs_companion : 1 = false;  // stream: this rank has no companion that it could use again
  std::uint8_t merge = 0;            // kind of the merge: 1 + Merge::index()
  bool receives = false;             // this rank takes memory of its own for received data (policy.hpp)
  std::uint64_t segment = 0;         // place of the segment in use; 0: not known yet
  bool closes = false;               // a second round is needed although this rank has nothing to move
  /// The route must check something with the other ranks of the list before bytes move (route.hpp: Preflight).
  bool needs_preflight = false;
  Residency residency = Residency::none;
  ForcedBy forced_by = ForcedBy::nobody;
  // Fields of single operations: merges, streams, ranks that receive into memory of their own, and devices.
  union {
    std::uint64_t extent = 0;  // merge: size along the concatenated dimension; the rest is in kind_hash
    std::uint64_t budget;      // stream: bytes of all senders of the list
    std::uint64_t device;      // devices: transfer_method.hpp
  };
  union {
    std::uint64_t capacity = 0;  // root, if bytes move: capacity of its free slot
    std::uint64_t hash_low;      // Same: XXH3-128 of the elements
    std::uint64_t depth;         // stream: pipeline_depth
    std::uint64_t free;          // bytes of its pool that no result uses
  };
  union {
    std::uint64_t taken = 0;  // bytes of that slot that have memory
    std::uint64_t hash_high;
    std::uint64_t pooled;  // bytes that this rank already has
    std::uint64_t room;    // how much its pool may grow: the rest of its memory_budget
  };
};
static_assert(sizeof(ExchangeRecord) <= 128, "round 1 costs at most 128 bytes per rank");
static_assert(std::is_trivially_copyable_v<ExchangeRecord>);

/// The records of all ranks of a group, or of some of them.
class Records {
 public:
  Records() = default;
  /// The records of all ranks.
  Records(std::vector<ExchangeRecord> all) noexcept : records_(std::move(all)) {}
  /// The records of some ranks, in any order. If there are several of one rank, one of them is kept.
  static Records of(std::vector<std::pair<int, ExchangeRecord>> some);

  [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }
  [[nodiscard]] auto begin() const noexcept { return records_.begin(); }
  [[nodiscard]] auto end() const noexcept { return records_.end(); }
  /// Returns the rank of the record at this position, from 0 to size() - 1. The ranks ascend.
  [[nodiscard]] int rank_at(std::size_t position) const noexcept {
    return ranks_.empty() ? static_cast<int>(position) : ranks_[position];
  }
  /// Returns the record of a rank. It is empty if this object has none of that rank.
  [[nodiscard]] const ExchangeRecord& operator[](std::size_t rank) const noexcept {
    return ranks_.empty() && rank < records_.size() ? records_[rank] : found(rank);
  }
  /// Marks the value of a rank as one that has not been sent.
  void drop_value(int rank) noexcept;

 private:
  [[nodiscard]] std::size_t position_of(std::size_t rank) const noexcept;
  [[nodiscard]] const ExchangeRecord& found(std::size_t rank) const noexcept;

  std::vector<int> ranks_;  // empty: records_ has one per rank
  std::vector<ExchangeRecord> records_;
};

/// Returns whether a closing round must follow because of this rank: bytes must still move, or it requests the round.
bool needs_closing(const ExchangeRecord& record) noexcept;
/// Returns whether a closing round follows because of any rank.
bool needs_closing(const Records& records) noexcept;

/// The text that a rank sends after a problem: its own failure, or its arguments, so that a mismatch can be shown.
using Words = WrittenError<640>;
static_assert(sizeof(Words) <= Group::max_record);

std::uint64_t hash_list(std::span<const int> ranks) noexcept;
/// Returns the list of a rank, by position. All of its members have the same list.
std::vector<int> list_of(int member, const Records& records);

/// The reason why an exchange cannot continue. The texts are composed from those of the ranks.
struct Problem {
  enum class Reason : std::uint8_t {
    failed_ranks,
    versions,
    lists,
    operations,
    kinds,
    contents,
    forced,  // the ranks of a list force different routes
    refused,
    budget,
    memory
  };
  Reason reason = Reason::failed_ranks;
  std::vector<int> ranks;  // the ranks that the problem is about
  Decision refused = {};   // for Reason::refused
};

/// Checks the records of all ranks, or of all members of some lists. Returns nullopt if the exchange can continue.
/// `group` knows which ranks share memory.
std::optional<Problem> find_problem(const Records& records, const Group& group);

/// Returns the error that all ranks throw, composed of the texts of all ranks.
Error make_error(const Problem& problem, const Records& records, std::span<const Words> words, const Group& group);

/// Returns the failure of the first of these ranks, and the number of other failed ranks.
Error failure_of(std::span<const int> failed, std::span<const Words> words, const Group& group);

/// Returns "rank 1: text; rank 3: text; and 4 more" with global ranks, and with `between` in place of ": ".
std::string each_words(const Group& group, std::span<const int> ranks, std::span<const Words> words,
                       std::string_view between, std::size_t shown);

Words words_of(const Error& error);
Words words_of(const std::string& text);

inline std::uint8_t status_of(ErrorKind kind) noexcept {
  return static_cast<std::uint8_t>(kind) + 1;
}

}  // namespace muster::gather
